"""The command line: argparse, tables, files. Heavy imports happen inside the commands."""
