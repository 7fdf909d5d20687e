WAYS: dict[tuple[str, str], int]
