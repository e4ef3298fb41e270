"""The commands, their arguments and their one-line help.

Importing a module of this package adds its commands; `--help` lists them in the order of these imports. Each command
imports its implementation when it is called.
"""

# isort: skip_file
from rlsdk.cli.commands.apps import app as app
from rlsdk.cli.commands import training as training
from rlsdk.cli.commands import models as models
from rlsdk.cli.commands import pages as pages
from rlsdk.cli.commands import preparing as preparing
from rlsdk.cli.commands import plugins as plugins
from rlsdk.cli.commands import environments as environments
