"""The errors a user can mend.

``UserError`` is the one exception the command line turns into a sentence and exit status 2. Everything else is
a defect and keeps its traceback.
"""


class UserError(ValueError):
    """Bad input: the text says what is wrong, what was given, what is allowed and what to do."""


class RankError(UserError):
    """A user error that only some ranks see, so that each of them says it; the others are said once per host."""


class PeerError(UserError):
    """Another rank has found what ends the job, and says so itself."""


class ConfigError(UserError):
    """One or more problems of a configuration.

    Args:
        problems: one sentence each.
    """

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = list(problems)
