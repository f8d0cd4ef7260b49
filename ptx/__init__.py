"""What nvcc compiled, run on a CPU: an interpreter of PTX, and checks that use it. docs/ptx.md explains it."""

from formats.interpreter import check

check("ptx")
