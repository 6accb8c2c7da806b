from pictool.commands.settings import read_settings


def setting(name, given, variable=None):
    return getattr(read_settings(), name)
