# Applets of a static busybox, by its own shell.
set -e
mkdir -p d/e/f; echo hello > d/x; echo two > d/e/y; ln -s ../x d/e/l; ln d/x d/h; chmod 640 d/e/y
# Directories differ in their sizes, and so do the sums of blocks.
ls -lR d | grep -v total | sed 's/[A-Z][a-z][a-z] .[0-9] [0-9:]*//' | awk '{print $1, $1 ~ /^d/ ? 0 : $5, $NF}'
 cp -r d d2; diff -r d d2 && echo same
tar cf t.tar d; tar tf t.tar | sort;  mkdir out; tar xf t.tar -C out; rm t.tar; find out | sort; find . -name y -exec cat {} \;
cat d/x | tr a-z A-Z | sed 's/L/_/g'; for i in 1 2 3; do echo $i; done | while read l; do echo "got $l"; done > log; cat log
(cd d; pwd | sed 's,.*/,,'; cd e; ls); wc -l log; grep -r two d; sort -r log; head -n 1 log; rm -r d2; mv d d3; ls d3
printf 'x\ny\n' > u; uniq u; cmp u log || true; stat -c '%s %a %F' d3/x u; du -s d3 > /dev/null; touch -d '2001-02-03 04:05' old; ls -l old | cut -c1-10
dd if=u of=v bs=1 count=3 2>/dev/null; md5sum v; od -c v; gzip -c u | gunzip -c; mkfifo p; (echo through > p &); cat p; trap 'echo caught' USR1; kill -USR1 $$; sleep 0
echo "$(echo sub $(echo nested))"; cat nothing 2>&1 || true; test -d d3 && echo yes; rm -rf d3 out; ls | sort
