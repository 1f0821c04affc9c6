"""Servers that tests run against: moto in this process, Ceph's RADOS gateway beside it. A Hub is in
`tests.hub`.
"""
