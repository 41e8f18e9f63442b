"""Renders a chart with Helm 4, in a process of its own: `PYTHONPATH=… python helm_library.py CHART < values.json`.

The input is a list of values, the output a list of mappings from the name of a template to its text.
"""

import json
import sys

from helm_python import Chart, _native

RELEASE = {
    "name": "demo",
    "namespace": "training",
    "api_versions": ["monitoring.coreos.com/v1"],
    "kube_version": "v1.32.0",
}


def main() -> None:
    """Render every one of the values."""
    chart = Chart.load(sys.argv[1])
    # The library's own `render` takes no API versions.
    texts = [
        _native.call_string("helm_render", chart._raw(), json.dumps(values), json.dumps(RELEASE))
        for values in json.load(sys.stdin)
    ]
    sys.stdout.write(json.dumps([json.loads(text) for text in texts]))


if __name__ == "__main__":
    main()
