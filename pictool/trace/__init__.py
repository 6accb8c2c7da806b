"""What the papers measure, as pure functions of images and scores that return frozen dataclasses."""
