"""A page with plots that needs nothing else: SVG in HTML."""
import html
import math

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 280, 80, 40, 16


def ticks(low, high, about=5):
    """Round numbers within [low, high]."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [i * step for i in range(first, int(math.floor(high / step + 1e-9)) + 1)]


def short(v):
    return f"{v:.3g}" if abs(v) < 1000 else f"{v:,.0f}".replace(",", " ")


def svg(series, x_label, y_label, from_zero=True):
    """series: {name: [(x, y)]}; a name that ends in "." is drawn as dots."""
    points = [p for s in series.values() for p in s]
    if not points:
        return ""
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = (0 if from_zero else min(p[1] for p in points)), max(p[1] for p in points)
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 * 1.05 if y1 > y0 else y0 + 1)

    def at(x, y):
        return (LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - BOTTOM - TOP))
    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for t in ticks(y0, y1):
        _, y = at(x0, t)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/><text x="{LEFT - 6}" y="{y + 4:.1f}" class="y">{short(t)}</text>')
    for t in ticks(x0, x1, 8):
        x, _ = at(t, y0)
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" class="x">{short(t)}</text>')
    for (name, s), colour in zip(series.items(), COLOURS * 3):
        if name.endswith("."):
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.5" fill="{colour}"/>' for x, y in (at(*p) for p in s)]
        else:
            out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join("%.1f,%.1f" % at(*p) for p in s)}"/>')
    for i, (name, colour) in enumerate(zip(series, COLOURS * 3)):
        out.append(f'<text x="{LEFT + 10 + 190 * (i % 4)}" y="{TOP + 4 + 14 * (i // 4)}" style="fill:{colour}">{html.escape(name.rstrip("."))}</text>')
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" class="x">{html.escape(x_label)}</text><text x="4" y="{HEIGHT - 6}">{html.escape(y_label)}</text></svg>')
    return "".join(out)


def page(title, parts):
    """parts: (heading, SVG or preformatted text)."""
    body = "".join(f"<h2>{html.escape(h)}</h2>" + (p if p.startswith("<svg") else f"<pre>{html.escape(p)}</pre>") for h, p in parts)
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>body{{font:14px system-ui,sans-serif;max-width:940px;margin:2em auto;color:#111;background:#fff}}svg{{width:100%}}text{{font-size:11px;fill:#444}}
.grid{{stroke:#ddd}}.y{{text-anchor:end}}.x{{text-anchor:middle}}pre{{overflow:auto;background:#f6f6f6;padding:1em}}</style><h1>{html.escape(title)}</h1>{body}</html>
"""
