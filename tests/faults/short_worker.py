"""A worker that fails at once."""


def main(arguments: list[str]) -> int:
    return 1
