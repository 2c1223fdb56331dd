"""Who owns which block and when it is inverted, and the messages between devices."""
