"""What can go wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line per problem, each naming the file."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems
