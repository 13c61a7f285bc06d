"""The input and output of an engine under the name that engines of other packages import them by."""

from scoremode.scores.answers import Answers, Window, WindowList, WindowSource, measured, prescribed_batches

__all__ = ["Answers", "Window", "WindowList", "WindowSource", "measured", "prescribed_batches"]
