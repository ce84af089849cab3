"""The whole federation on one terminal: what is drawn, and which key does what.

It gets messages and gives lines; the calls and the terminal itself are elsewhere. Every line fits the width.
"""
