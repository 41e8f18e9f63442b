"""The node daemon: follows the journals of all local ranks, and hands what they hold to store, rules, metrics and page."""
