"""What our ops race against, one file a family: the peers' ways and what a skilled user would write.

Re-typed from descriptions of what each library computes and in which order; none of their code is here.
"""
