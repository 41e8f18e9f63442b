"""The node daemon: follows the journals of all local ranks and feeds store, rules, metrics and page from them."""
