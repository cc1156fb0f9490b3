"""What helps to understand a program: which constants of a compiled function have changed."""

from anabranch.debug._captures import check_captures

__all__ = ["check_captures"]
