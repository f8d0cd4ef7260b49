"""What the files of a folder weigh, in bytes, as they are and by gzip: python3 tools/web_sizes.py FOLDER"""

import gzip
import sys
from pathlib import Path

folder = Path(sys.argv[1])
total = total_sent = 0
for path in sorted(p for p in folder.rglob("*") if p.is_file()):
    size, sent = path.stat().st_size, len(gzip.compress(path.read_bytes()))
    total, total_sent = total + size, total_sent + sent
    print(f"{path.relative_to(folder)!s:40} {size:>10} {sent:>10}")
print(f"{'all, in bytes, as they are and by gzip':40} {total:>10} {total_sent:>10}")
