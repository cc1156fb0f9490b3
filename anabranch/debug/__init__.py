"""What helps to understand a program: changed constants, and why a function was traced again."""

from anabranch.debug._captures import check_captures
from anabranch.debug._explain import explain, explain_retrace

__all__ = ["check_captures", "explain", "explain_retrace"]
