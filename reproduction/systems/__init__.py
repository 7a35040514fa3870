"""Systems the paper is compared with, one module each.

Every system maps a batch to outputs of shape ``(member, batch, class)``, so the functions of
``embens.metrics`` apply to all of them. Only torch and public names of embens are used.
"""
