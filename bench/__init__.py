"""Models of real sizes with random weights, for measuring speed and memory."""
