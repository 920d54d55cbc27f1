"""`python -m atlas.doctor [MODEL]`: checks this install and this machine, and says what to do about what is wrong."""
