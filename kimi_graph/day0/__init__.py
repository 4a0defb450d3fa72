"""What of a model is served by what, and what is not and why, on the day it is released."""
