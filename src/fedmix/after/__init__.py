"""After training: predictions, every kind of inference, what leaked."""
