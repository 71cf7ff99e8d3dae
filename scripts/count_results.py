#!/usr/bin/env python3
"""Adds up JUnit result files, names failures and the reasons of skips, and ends with the one line that people and
machines read: "N passed, N failed, N skipped". Exit code 1 when something failed or nothing passed.

  count_results.py --sum DIR
  count_results.py --write FILE --suite NAME (--pass CASE | --fail CASE)
"""
import argparse
import collections
import pathlib
import sys
import xml.etree.ElementTree as xml


def write(path, suite, case, failed):
    root = xml.Element("testsuite", name=suite, tests="1", failures=str(int(failed)))
    entry = xml.SubElement(root, "testcase", name=case, classname=suite)
    if failed:
        xml.SubElement(entry, "failure", message="see the log above")
    xml.ElementTree(root).write(path)


def total(folder):
    passed, failures, skips = 0, [], collections.Counter()
    for file in sorted(pathlib.Path(folder).glob("*.xml")):
        try:
            cases = list(xml.parse(file).getroot().iter("testcase"))
        except xml.ParseError as error:
            failures.append(f"{file.name}: unreadable ({error})")
            continue
        for case in cases:
            name = f"{file.stem}: {case.get('classname')}.{case.get('name')}"
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
                failures.append(name)
            elif skipped is not None or case.get("status") in ("notrun", "disabled"):
                reason = (skipped.get("message") if skipped is not None else None) or ""
                if not reason.strip() or reason.startswith("SKIP_REGULAR"):
                    lines = [l.strip() for l in (case.findtext("system-out") or "").splitlines()]
                    marked = [l for l in lines if l.startswith("skipped: ")]
                    after = [lines[i + 1] for i, l in enumerate(lines) if l.endswith(": Skipped") and i + 1 < len(lines)]
                    reason = (marked or after or ["no reason given"])[0]
                skips[reason.strip()] += 1
            else:
                passed += 1
    for reason, count in skips.most_common():
        print(f"skipped {count}: {reason}")
    for name in failures:
        print(f"FAILED {name}")
    print(f"{passed} passed, {len(failures)} failed, {sum(skips.values())} skipped")
    return 1 if failures or not passed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sum", metavar="DIR")
    parser.add_argument("--write", metavar="FILE")
    parser.add_argument("--suite")
    parser.add_argument("--pass", dest="ok", metavar="CASE")
    parser.add_argument("--fail", metavar="CASE")
    args = parser.parse_args()
    if args.sum:
        sys.exit(total(args.sum))
    if not args.write or not args.suite or bool(args.ok) == bool(args.fail):
        parser.error("--write needs --suite and one of --pass, --fail")
    write(args.write, args.suite, args.ok or args.fail, bool(args.fail))


if __name__ == "__main__":
    main()
