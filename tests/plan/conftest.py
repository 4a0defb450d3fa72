from tests.compile.conftest import host  # noqa: F401  torchair, as the tests of the compiler find it
