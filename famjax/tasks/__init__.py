"""Synthetic tasks: passkey retrieval and the toy tasks, as sources of documents.

Episodes are generated from a seed and a number when they are read; nothing is downloaded.
"""
