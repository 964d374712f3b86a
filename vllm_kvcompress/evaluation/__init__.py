"""What compression costs and gives on a model: quality, speed, and a report of both."""
