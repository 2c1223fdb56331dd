"""What the scripts of this example refuse with; apart, so that worker processes need no command line for it."""


class UserError(Exception):
    """Something the user can put right; reported as one sentence, without a traceback."""
