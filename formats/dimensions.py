"""Whether the matrices of a checkpoint have the dimensions that a scheme needs."""

from formats.errors import ModelError
from formats.limits import MAX_GROUP_SIZE
from formats.source import Source


def check_group_size(
    checkpoint: Source, group_size: int, option: str = "--group-size", allowed: tuple[int, ...] | None = None
) -> None:
    """Refuses a group size that does not divide every row of every matrix.

    Names the largest power of two that does, if it is one of the allowed sizes; None: all are.
    """
    c = checkpoint.config
    rows = {"hidden_size": c.dim, "intermediate_size": c.hidden_dim, "num_attention_heads * head_dim": c.q_dim}
    best = 1
    while all(n % (2 * best) == 0 for n in rows.values()):
        best *= 2
    best = min(best, MAX_GROUP_SIZE)
    if group_size < 4 or group_size % 4 or group_size > MAX_GROUP_SIZE:
        most = f" up to {MAX_GROUP_SIZE}" if group_size > MAX_GROUP_SIZE else ""
        would_do = f"; {best} would do" if best >= 4 else ""
        raise ModelError(f"{option} is {group_size}, expected a multiple of 4{most}{would_do}")
    possible = best >= 4 and (allowed is None or best in allowed)
    hint = f"; the largest power of two that would do is {best}" if possible else ""
    for name, n in rows.items():
        if n % group_size:
            raise ModelError(f"{checkpoint.config_path}: {name} is {n}, not a multiple of {option} {group_size}{hint}")


def check_rows(checkpoint: Source) -> None:
    """Refuses rows that cannot share one scale: no multiple of 4, or so long that a sum of products leaves int32."""
    c = checkpoint.config
    rows = {"hidden_size": c.dim, "intermediate_size": c.hidden_dim, "num_attention_heads * head_dim": c.q_dim}
    for name, n in rows.items():
        if n % 4 or n > MAX_GROUP_SIZE:
            raise ModelError(
                f"{checkpoint.config_path}: {name} is {n}, expected a multiple of 4, at most {MAX_GROUP_SIZE}"
            )
