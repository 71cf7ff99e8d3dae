"""Judgements on series, apart from what makes them, so that tests can feed them series that must pass and that must fail."""
import statistics


def slope(points):
    """Theil-Sen: the median of the slopes of all pairs of (x, y). One jump in a flat series does not move it, a steady climb does."""
    slopes = [(y1 - y0) / (x1 - x0) for i, (x0, y0) in enumerate(points) for x1, y1 in points[i + 1:] if x1 != x0]
    return statistics.median(slopes) if slopes else 0.0


def growth(points, warm_up=1 / 3):
    """Bytes per request by which memory climbs: points are (requests so far, bytes), the first `warm_up` of the requests are left out.

    A leak climbs all the time; what a program keeps once (a pool, a cache, an arena of malloc) is a step. So the largest step between two
    points is taken out first: of a leak it is one part of many.
    """
    late = [p for p in points if p[0] >= warm_up * points[-1][0]] if points else []
    if len(late) < 8:
        raise ValueError(f"{len(late)} points after the warm-up are too few to tell a climb from a step; take more rounds")
    steps = [y1 - y0 for (_, y0), (_, y1) in zip(late, late[1:])]
    at = max(range(len(steps)), key=steps.__getitem__)
    return slope(late[:at + 1] + [(x, y - max(steps[at], 0)) for x, y in late[at + 1:]])


def is_flat(points, bytes_per_request, warm_up=1 / 3):
    return growth(points, warm_up) <= bytes_per_request


def slowdown(first, last, least=5):
    """How many times slower the last requests are than the first: the median over kinds, each with `least` of both, of the ratio of its
    medians. first and last map a kind to its seconds."""
    ratios = {k: statistics.median(last[k]) / statistics.median(first[k]) for k in first if len(first[k]) >= least and len(last.get(k, ())) >= least}
    if not ratios:
        raise ValueError("no kind of request is frequent enough at both ends")
    return statistics.median(ratios.values()), ratios


def between(name, value, least, most):
    """A sentence if a counter is not what the client's log says; least < most where a client left before it could know."""
    if least <= value <= most:
        return None
    return f"{name} is {value:g}, the client counts {least:g}" + (f" to {most:g}" if most != least else "")


def percentile(values, q):
    if not values:
        return None
    v = sorted(values)
    at = (len(v) - 1) * q / 100
    low = int(at)
    return v[low] + (v[min(low + 1, len(v) - 1)] - v[low]) * (at - low)
