"""Where clients live. An engine takes what the server sends, gives back replies, and owns each client's private state."""
