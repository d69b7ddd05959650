//! `defuse run`: unmodified programs with their working directory in a mount do exactly what they
//! do natively.

mod common;
#[path = "run/lists.rs"]
mod lists;
#[path = "run/locks.rs"]
mod locks;
#[path = "run/rings.rs"]
mod rings;
#[path = "run/special.rs"]
mod special;
#[path = "run/stores.rs"]
mod stores;
#[path = "run/waits.rs"]
mod waits;
#[path = "run/writers.rs"]
mod writers;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{PROGRAM, TestPlace};

/// The output and the exit code of a script.
#[derive(Debug, PartialEq, Eq)]
struct ScriptOutput {
    code: Option<i32>,
    out: String,
    err: String,
}

/// Runs a command to its end. Kills one that hangs, with all its descendants, so that only its test
/// fails.
fn finish(command: Command) -> ScriptOutput {
    let mut limited = Command::new("timeout");
    limited.args(["-s", "KILL", "180"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        limited.current_dir(directory);
    }
    limited.stdin(Stdio::null()).env("LC_ALL", "C").env("HOME", "/nonexistent");
    let output = limited.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ScriptOutput {
        code: output.status.code(),
        out: text(&output.stdout),
        err: text(&output.stderr),
    }
}

fn is_there(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    found.is_ok_and(|output| output.status.success())
}

/// Runs `script` in a native directory, and with its working directory in a mount. Both runs must
/// have the same output, and leave the same files.
fn compare(name: &str, needs: &[&str], mount: &str, script: &str) {
    compare_with(&[], name, needs, mount, script);
}

/// Runs the comparison of [`same`], with further `options` of the run.
fn compare_with(options: &[&str], name: &str, needs: &[&str], mount: &str, script: &str) {
    if let Some(missing) = needs.iter().find(|program| !is_there(program)) {
        println!("skipped: {name}: {missing} is not installed");
        return;
    }
    let place = TestPlace::new();
    let (native, source) = (place.path("native"), place.path("src"));
    fs::create_dir(&native).unwrap();
    // A listing at the end shows the files: names, types, sizes, permissions and contents.
    let script = format!(
        "{script}\nset +e; find . -mindepth 1 -printf '%p %y %m %s %l\\n' | grep -v ' d ' | \
         sort | grep -v '[.]git/' ; find . -type f | grep -v '[.]git/' | sort | xargs cksum"
    );
    let mut plain = Command::new("bash");
    plain.args(["-c", &script]).current_dir(&native);
    let library = place.library_for_all_users();
    // Programs print their environment.
    let variable = library.iter().map(|library| ("DEFUSE_PRELOAD_LIBRARY", library));
    plain.envs(variable.clone());
    let expected = finish(plain);

    let target = "/defuse-test";
    let mount = mount.replace("SRC", &source.display().to_string());
    let mut run = Command::new(PROGRAM);
    run.args(["run", "-C", target, "--mount", &format!("{target}={mount}")]).args(options);
    run.args(["--", "bash", "-c", &script]);
    run.envs(variable);
    let mut seen = finish(run);
    // The outputs may differ only in the path.
    let native = native.display().to_string();
    seen.out = seen.out.replace(target, &native);
    seen.err = seen.err.replace(target, &native);
    // A run warns of seccomp filters, because it cannot know which calls they would have denied.
    let is_said = |line: &&str| !line.starts_with("defuse: a program filters its system calls");
    seen.err = seen.err.split_inclusive('\n').filter(is_said).collect();
    assert_eq!(seen, expected, "{name} on {mount}");
    assert!(!Path::new(target).exists(), "nothing is made outside");
}

/// Simulates a C library that cannot be analysed: calls are served only through the functions that
/// programs import. The listing of files is not compared, because ls(1) and find(1) use calls
/// within the C library.
fn run_by_symbols(name: &str, _: &[&str], program: &str) {
    for source in ["passthrough:SRC", "passthrough:SRC,backing=off", "memory:"] {
        let place = TestPlace::new();
        let native = place.path("native");
        fs::create_dir(&native).unwrap();
        let mut plain = Command::new(program);
        plain.current_dir(&native);
        let expected = finish(plain);
        let source = source.replace("SRC", &place.path("src").display().to_string());
        let mount = format!("/defuse-test={source}");
        let run = ["run", "--symbols-only", "-C", "/defuse-test", "--mount", &mount, "--", program];
        assert_eq!(finish(place.command(&run)), expected, "{name} on {mount}");
    }
}

fn run_everywhere(name: &str, needs: &[&str], script: &str) {
    run_on_passthrough(name, needs, script);
    // In another process, which all programs of the run share.
    compare(name, needs, "memory:", script);
}

fn run_on_passthrough(name: &str, needs: &[&str], script: &str) {
    compare(name, needs, "passthrough:SRC", script);
    // Without backing descriptors every call is served in the process.
    compare(name, needs, "passthrough:SRC,backing=off", script);
}

/// Also with dispatch of calls that the C library does not make.
fn run_dispatched(name: &str, needs: &[&str], script: &str) {
    for mount in ["passthrough:SRC", "passthrough:SRC,backing=off", "memory:"] {
        compare_with(&["--dispatch"], name, needs, mount, script);
    }
}

#[test]
fn coreutils_do_what_they_do_natively() {
    let script = r#"
        set -e
        echo hello > f; cat f; cp f g; cp -a f g2; mv g h; ln f hard; ln -s f soft; readlink soft
        mkdir -p d/e/f; echo x > d/e/f/x; cp -r d d2; ls -1R d2; rm -r d2; rmdir d/e/f 2>&1 || true
        sort -r f h | uniq -c; tail -n 1 f; head -c 3 f; wc f; od -c f | head -2; tac f; nl f
        dd if=f of=dd bs=2 count=2 2>/dev/null; truncate -s 100 t; stat -c '%F %a' t d soft
        chmod 640 f; stat -c %a f; touch -d 2001-02-03 old; date -r old +%Y; install -m 755 f inst
        mktemp -p . tmp.XXXXXX | sed 's/tmp.*/tmp/'; rm tmp.*; split -b 3 f part.; cat part.*
        test -r f && test -w f && echo yes; test -x f || echo no; realpath --relative-to=. soft
        tee copy < f; comm f h; cut -c 1-2 f; tr a-z A-Z < f; join f f; paste f h; shred -u copy
        du -s --apparent-size d >/dev/null; df . > /dev/null; sync f; pathchk f; basename $(pwd)/x
        mkfifo p; (echo through > p &); cat p; ln -s nowhere dangling; cat dangling 2>&1 || true
        cat nothing 2>&1 || true; cd d; pwd; cd ..; ls -d */; unlink h; tail -c 2 f; cksum f; md5sum f
    "#;
    run_everywhere("coreutils", &["bash"], script);
}

#[test]
fn an_open_file_has_the_lowest_number_that_is_free_and_closes_at_exec_as_asked() {
    let script = r#"
        echo hello > f; ln f g; ln -s f l
        cat > numbers.py <<'END'
import fcntl, os
flags = os.O_RDONLY | os.O_CLOEXEC
made = [os.open(name, flags) for name in ("f", "g", "l", "f")]
os.close(made[1])
made[1] = os.open("new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
made.append(os.open("f", os.O_RDWR | os.O_NONBLOCK))
print([fd - made[0] for fd in made])
print([fcntl.fcntl(fd, fcntl.F_GETFD) for fd in made])
print([fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_NONBLOCK) for fd in made])
os.system("cat <&%d >&%d" % (made[0], made[1]))
print(os.lseek(made[0], 0, os.SEEK_CUR), os.stat("new").st_size)
os.close(0)
print(os.open("f", flags), os.read(0, 9))
END
        python3 numbers.py
    "#;
    run_everywhere("numbers", &["python3"], script);
    compare("numbers", &["python3"], "passthrough:SRC,handles=off", script);
    // A layer that sees each read takes the descriptor of the file away, and with it the program's
    // descriptor.
    let place = TestPlace::new();
    let source = place.path("src");
    fs::create_dir_all(&source).unwrap();
    fs::write(source.join("f"), "hello").unwrap();
    let open = "import os; fds = [os.open('f', os.O_RDONLY) for _ in 'abc']; print([fd - fds[0] for fd in fds])";
    let mount = format!("/defuse-test=passthrough:{},ro", source.display());
    let mut run = Command::new(PROGRAM);
    run.args(["run", "-C", "/defuse-test", "--mount", &mount, "--", "python3", "-c", open]);
    assert_eq!(finish(run).out, "[0, 1, 2]\n");
}

#[test]
fn shells_redirect_and_pipe() {
    let script = r#"
        exec 3> out; echo one >&3; (echo two >&3); bash -c 'echo three >&3'; exec 3>&-; cat out
        { echo a; echo b; } > both; while read line; do echo "got $line"; done < both
        cat <<END | sort > sorted
z
y
END
        cat sorted; for i in 1 2 3; do echo $i; done >> out; wc -l < out; echo err 2> e >&2; cat e
        (cd /; pwd); exec 4<> rw; echo data >&4; exec 4<&-; cat rw; : > empty; [ -s empty ] || echo empty
        printf '#!/bin/sh\necho "$0 $*"\n' > s; chmod +x s; ./s a b; cp $(command -v true) mytrue; ./mytrue && echo ran
        diff <(echo 1) <(echo 2); echo $?; set -C; echo x > out 2>&1; echo $?
    "#;
    run_everywhere("bash", &["bash"], script);
}

#[test]
fn archives_and_trees_come_out_the_same() {
    let script = r#"
        set -e
        mkdir -p a/b; echo 1 > a/1; echo 2 > a/b/2; ln -s ../1 a/b/l; ln a/1 a/h
        tar cf t.tar a; mkdir x; tar xf t.tar -C x; diff -r a x/a; find x -type l -o -type f | sort
        find a -name '*2' -exec cat {} +; find . -newer a/1 -name t.tar; rm t.tar
    "#;
    run_everywhere("tar and find", &["tar", "find"], script);
    let script =
        "mkdir -p a/b; echo 1 > a/1; rsync -a a/ b/; echo 2 >> a/1; rsync -a a/ b/; cat b/1";
    run_everywhere("rsync", &["rsync"], script);
}

#[test]
fn git_keeps_its_history() {
    let script = r#"
        set -e; export GIT_AUTHOR_DATE='2020-01-01 00:00 +0000' GIT_COMMITTER_DATE='2020-01-01 00:00 +0000'
        git -c init.defaultBranch=m init -q r; cd r; git config user.email a@b; git config user.name n
        for i in 1 2 3; do echo $i > f$i; git add .; git commit -qm "c$i"; done
        git gc -q; git fsck 2>&1; git log --format='%h %s'; git checkout -q -b x HEAD~1; ls; git status --short
        cd ..; git clone -q r s; cd s; git log --oneline | wc -l
    "#;
    run_everywhere("git", &["git"], script);
}

#[test]
fn compilers_build_and_what_they_build_runs() {
    let script = r#"
        set -e
        printf '#include <stdio.h>\nint main(){FILE*f=fopen("o","w");fprintf(f,"%%d\\n",7);fclose(f);puts("ok");}' > x.c
        printf 'all: x\nx: x.c\n\t@gcc -O0 -o x x.c\n' > Makefile; make -s -j2; ./x; cat o; rm x
    "#;
    run_everywhere("gcc and make", &["gcc", "make"], script);
}

#[test]
fn databases_and_languages_work() {
    let script =
        "sqlite3 db 'pragma journal_mode=wal; create table t(a); insert into t values(1),(2);
        select sum(a) from t;'; sqlite3 db 'select count(*) from t'; rm db*";
    run_everywhere("sqlite3", &["sqlite3"], script);
    let script = r#"perl -e 'open F,">p";print F "x\n";close F;open F,"<p";print <F>;print `cat p`;
        mkdir "d";opendir D,".";print join(",",sort grep !/^\./,readdir D),"\n";unlink "p";' "#;
    run_everywhere("perl", &["perl"], script);
    let script = r#"python3 -c '
import os, mmap, fcntl, tempfile
f = open("m", "w+b"); f.write(b"0" * 8192); f.flush()
m = mmap.mmap(f.fileno(), 8192); m[0:5] = b"hello"; m.flush(); m.close(); f.seek(0); print(f.read(6))
fcntl.lockf(f, fcntl.LOCK_EX); fcntl.flock(f, fcntl.LOCK_SH); os.makedirs("a/b")
print(sorted(os.listdir(".")), os.stat("m").st_size == os.fstat(f.fileno()).st_size, os.stat("m").st_dev == os.fstat(f.fileno()).st_dev)
r, w = os.pipe(); pid = os.fork()
if pid == 0: os.write(f.fileno(), b"child"); os._exit(0)
os.waitpid(pid, 0); print(os.lseek(f.fileno(), 0, 1)); os.rename("m", "n"); print(os.path.realpath("n") == os.getcwd() + "/n")
with tempfile.TemporaryDirectory(dir=".") as d: open(d + "/x", "w").close()
' "#;
    run_everywhere("python3", &["python3"], script);
}

/// A parent that waits, as in vfork(2) and posix_spawn(3), has not requested a copy of its
/// connection for the child.
#[test]
fn children_whose_parents_wait_use_files_before_they_execute_a_program() {
    let script = r#"
        mkdir d; echo one >d/one; echo two >d/two
        python3 -c '
import fcntl, os, subprocess, sys
held = open("d/held", "w+"); held.write("held"); held.flush()
fcntl.lockf(held, fcntl.LOCK_EX)
gone = open("d/gone", "w+"); gone.write("gone\n"); gone.flush(); os.unlink("d/gone")
look = """
import fcntl
try: fcntl.lockf(open("d/held", "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB); print("free")
except OSError: print("taken")
"""
for turn in range(5):
    os.utime("d/two", (1, 2))
    open("d/two").read()
    subprocess.run(["sh", "-c", "test $(stat -c %X d/two) -gt 2 && echo read"], check=True)
    shell = ["sh", "-c", "cat; cat two; pwd | sed s,.*/,,; echo new >>new"]
    subprocess.run(shell, stdin=open("d/one"), cwd="d", check=True)
    gone.seek(0)
    subprocess.run(["cat"], stdin=gone, check=True)
    out = "d/out%d" % turn
    actions = [(os.POSIX_SPAWN_OPEN, 0, "d/two", os.O_RDONLY, 0),
               (os.POSIX_SPAWN_OPEN, 1, out, os.O_WRONLY | os.O_CREAT, 0o644)]
    child = os.posix_spawn("/bin/cat", ["cat"], os.environ, file_actions=actions)
    print(os.waitpid(child, 0)[1], open(out).read(), end="", flush=True)
    subprocess.run([sys.executable, "-c", look], check=True)
print(held.seek(0), held.read())
        '; cat d/new"#;
    // Where descriptors are the kernel's, or another process has the files.
    for mount in ["passthrough:SRC", "memory:"] {
        compare("waiting", &["python3"], mount, script);
    }
}

#[test]
fn editors_write_their_files() {
    let script =
        "printf 'hi\\nthere\\n' > x; vim -u NONE -i NONE -es -c '%s/hi/ho/' -c 'wq' x; cat x";
    run_everywhere("vim", &["vim"], script);
}

#[test]
fn one_program_has_files_in_its_own_memory() {
    let place = TestPlace::new();
    let target = "/defuse-test";
    let script = r#"
import os, mmap
os.mkdir("d"); f = open("d/x", "w+b"); f.write(b"0" * 5000); f.flush(); m = mmap.mmap(f.fileno(), 5000)
m[0:2] = b"hi"; m.flush(); m.close(); f.seek(0); print(f.read(3), os.getcwd(), os.listdir("."))
import select; print(len(select.select([f], [f], [], 5)[0])); g = os.dup(f.fileno()); os.lseek(g, 7, 0)
print(os.lseek(f.fileno(), 0, 1)); import shutil; shutil.copytree("d", "e"); print(os.stat("e/x").st_size)
open("mem:/y", "w").write("named"); print(open("mem:/y").read(), os.path.exists("y"))
"#;
    if !is_there("python3") {
        println!("skipped: python3 is not installed");
        return;
    }
    // The interpreter itself: the program in PATH may be a script that starts it.
    let found = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let python = String::from_utf8(found.unwrap().stdout).unwrap();
    let mount = format!("{target}=memory:,size=1M");
    let mut run =
        place.command(&["run", "--fork", "deny", "-C", target, "--mount", &mount, "--mount"]);
    run.args(["mem:=memory:", "--", python.trim(), "-c", script]);
    let seen = finish(run);
    let expected = "b'hi0' /defuse-test ['d']\n1\n7\n5000\nnamed False\n";
    assert_eq!((seen.out.as_str(), seen.err.as_str(), seen.code), (expected, "", Some(0)));
}

/// A run uses the results of earlier runs. Damaged or changed cache files do not affect a program.
#[test]
fn a_directory_that_becomes_a_link_into_a_mount_is_followed_at_once() {
    // The shell has looked at the directory just before other programs replace it, in each way that
    // there is.
    let script = r#"
        set -e; echo inside > "$2/file"; cd "$1"
        for by in 'ln -s "$2" dir' 'ln -s "$2" made; mv -T made dir' 'ln -s "$2" made; ln -P made dir'; do
            mkdir dir; echo outside > dir/file
            read -r before < dir/file
            rm -r dir; eval "$by"
            read -r after < dir/file
            echo "$before $after"
            rm -f dir made
        done
    "#;
    let place = TestPlace::new();
    let target = "/defuse-test";
    for source in ["memory:".to_owned(), format!("passthrough:{}", place.path("src").display())] {
        let mut command = Command::new(PROGRAM);
        command.args([
            "run",
            "--mount",
            &format!("{target}={source}"),
            "--",
            "sh",
            "-c",
            script,
            "sh",
        ]);
        command.arg(place.path("")).arg(target);
        let seen = finish(command);
        let expected = "outside inside\n".repeat(3);
        assert_eq!((seen.code, &*seen.out, &*seen.err), (Some(0), &*expected, ""), "{source}");
    }
}

#[test]
fn the_cache_of_a_run_may_be_damaged_or_owned_by_another_user() {
    let place = TestPlace::new();
    let (cache, source) = (place.path("cache"), place.path("src"));
    fs::write(source.join("x"), "inside").unwrap();
    // A directory named by the variable is not created.
    fs::create_dir(&cache).unwrap();
    let mount = format!("/defuse-test=passthrough:{}", source.display());
    // printf and read call stdio's and the shell's own functions, which reach the library only by
    // patches.
    let run = || {
        let mut run = place.command(&["run", "--mount", &mount, "--", "bash", "-c"]);
        run.arg("read -r line < /defuse-test/x; echo $line").env("XDG_CACHE_HOME", &cache);
        let seen = finish(run);
        assert_eq!((seen.out.as_str(), seen.err.as_str(), seen.code), ("inside\n", "", Some(0)));
    };
    let kept = || {
        let entries = fs::read_dir(cache.join("defuse")).unwrap();
        let mut kept: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
        kept.sort();
        kept
    };
    let read = || kept().iter().map(|path| fs::read(path).unwrap()).collect::<Vec<_>>();
    run();
    let good = read();
    assert!(!good.is_empty(), "libraries have build ids");
    let changed = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    let before: Vec<_> = kept().iter().map(|path| changed(path)).collect();
    run();
    let after: Vec<_> = kept().iter().map(|path| changed(path)).collect();
    assert_eq!(before, after, "nothing is found out twice");
    for path in kept() {
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    run();
    assert_eq!(read(), good, "what is damaged is written anew");
    for path in kept() {
        fs::write(&path, b"dfsites0 of another version").unwrap();
    }
    run();
    assert_eq!(read(), good);
    if !rustix::process::geteuid().is_root() {
        println!("skipped: files of other users: needs root");
        return;
    }
    for path in kept() {
        fs::write(&path, b"").unwrap();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
    }
    run();
    assert!(read().iter().all(Vec::is_empty), "what is somebody else's is not touched");
}

/// Calls are counted by their number, and by the function of the C library that made them.
#[test]
fn a_report_counts_calls_and_functions() {
    let place = TestPlace::new();
    let mount = format!("/defuse-test=passthrough:{},backing=off", place.path("src").display());
    let script =
        "mkdir /defuse-test/d; mkdir /defuse-test/e; mkdir /defuse-test/d 2>/dev/null; cd /";
    let run = ["run", "--report", "--mount", &mount, "--", "sh", "-c", script];
    let seen = finish(place.command(&run));
    let (calls, functions) = seen.err.split_once("\n\n").expect("two tables");
    let row = |table: &str, name: &str| -> Vec<u64> {
        let mut lines = table.lines().map(str::split_whitespace);
        let row = lines.find_map(|mut words| (words.next() == Some(name)).then_some(words));
        row.unwrap_or_else(|| panic!("no {name} in {table}")).map(|n| n.parse().unwrap()).collect()
    };
    assert_eq!(row(calls, "mkdir"), [3, 0, 0]);
    assert_eq!(row(functions, "mkdir"), [3, 0, 0]);
    assert_eq!(row(calls, "chdir"), row(functions, "chdir"));
}

#[test]
fn a_report_counts_calls_without_a_library() {
    if !is_there("busybox") {
        println!("skipped: busybox is not installed");
        return;
    }
    let place = TestPlace::new();
    let mount = format!("/defuse-test=passthrough:{}", place.path("src").display());
    let run = ["run", "--report", "--dispatch", "--mount", &mount, "--", "busybox", "mkdir"];
    let mut run = place.command(&run);
    run.args(["/defuse-test/d", "/defuse-test/e"]);
    let seen = finish(run);
    let row = seen.err.lines().find(|line| line.starts_with("mkdir ")).unwrap_or_default();
    let counts: Vec<_> = row.split_whitespace().skip(1).collect();
    assert_eq!((counts, seen.code), (vec!["2", "0", "0"], Some(0)), "{seen:?}");
}

#[test]
fn the_exit_code_is_that_of_the_program() {
    let place = TestPlace::new();
    for (script, code) in [("exit 7", 7), ("kill -TERM $$", 143), ("true", 0)] {
        let said = place.command(&["run", "--", "sh", "-c", script]).status().unwrap();
        assert_eq!(said.code(), Some(code), "{script}");
    }
    let seen = finish(place.command(&["run", "--mount", "/x=passthrough:/no/such", "--", "true"]));
    assert!(seen.err.contains("/no/such") && seen.code == Some(125), "{seen:?}");
    let seen = finish(place.command(&["run", "--", "no-such-program"]));
    assert!(seen.err.contains("no-such-program") && seen.code == Some(127), "{seen:?}");
}

#[test]
fn a_fork_that_would_lose_files_is_refused_with_the_next_step() {
    let place = TestPlace::new();
    let run =
        ["run", "--fork", "deny", "--mount", "mem:=memory:", "--", "sh", "-c", "(true); echo not"];
    let seen = finish(place.command(&run));
    assert!(seen.err.contains("--fork server"), "{seen:?}");
    assert!(!seen.out.contains("not"), "{seen:?}");
}

/// Compiles a C program, and runs it natively and in a mount. Both runs must have the same output.
fn compare_c(name: &str, code: &str, check: fn(&str, &[&str], &str)) {
    compare_compiled(&[], name, code, check);
}

/// Runs the comparison of [`same_c`], for a statically linked program.
fn compare_static(name: &str, code: &str, check: fn(&str, &[&str], &str)) {
    compare_compiled(&["-static"], name, code, check);
}

fn compare_compiled(how: &[&str], name: &str, code: &str, check: fn(&str, &[&str], &str)) {
    if !is_there("gcc") {
        println!("skipped: {name}: gcc is not installed");
        return;
    }
    let place = TestPlace::new();
    let (source, program) = (place.path("t.c"), place.path("t"));
    fs::write(&source, code).unwrap();
    let mut compiler = Command::new("gcc");
    compiler.args(["-O1", "-w", "-pthread", "-o"]).arg(&program).arg(&source).args(how);
    let status = compiler.stderr(Stdio::null()).status().unwrap();
    if !status.success() && !how.is_empty() {
        println!("skipped: {name}: there is no static C library");
        return;
    }
    assert!(status.success(), "{name} does not compile");
    check(name, &[], &program.display().to_string());
}

#[test]
fn calls_of_every_family_behave_as_natively() {
    compare_c("families", include_str!("run/families.c"), run_everywhere);
}

// The entry wrote to our stack before the thread was on it. A signal in between was handled at
// once, and a call of its handler overwrote what the interrupted call had written: the kernel got
// the arguments of the handler.
#[test]
fn a_signal_may_interrupt_a_call_at_each_instruction() {
    compare_c("stepped", include_str!("run/stepped.c"), run_everywhere);
}

// Waiting for a lock set errno although the call succeeded. LMDB checks errno after fcntl(2), and
// did not open its database.
#[test]
fn calls_that_succeed_leave_errno_alone() {
    compare_c("errno", include_str!("run/errno.c"), run_everywhere);
}

#[test]
fn a_thousand_forks_in_a_row_share_one_position() {
    compare_c("forks", include_str!("run/forks.c"), run_everywhere);
}

#[test]
fn many_threads_open_and_close_while_signals_arrive() {
    compare_c("threads", include_str!("run/threads.c"), run_on_passthrough);
}

/// Opening a fifo walked the path three times. If another process replaced the fifo by a file
/// meanwhile, the program had a fifo that reported to be a file. A file removed after the walk
/// caused ESTALE.
#[test]
fn a_name_that_another_process_replaces_is_the_old_file_or_the_new() {
    compare_c("swaps", include_str!("run/swaps.c"), run_everywhere);
}

#[test]
fn ending_threads_unmap_the_stacks_of_others() {
    compare_c("endings", include_str!("run/endings.c"), run_everywhere);
}

#[test]
fn programs_with_small_stacks_work() {
    compare_c("stacks", include_str!("run/stacks.c"), run_everywhere);
}

#[test]
fn handlers_on_alternate_stacks_use_files_during_file_operations() {
    compare_c("onstack", include_str!("run/onstack.c"), run_everywhere);
}

#[test]
fn shared_mappings_of_a_file_are_one() {
    compare_c("mappings", include_str!("run/mappings.c"), run_everywhere);
}

#[test]
fn programs_that_map_one_file_see_each_other() {
    compare_c("shared", include_str!("run/shared.c"), |name, needs, script| {
        compare(name, needs, "passthrough:SRC", script);
        compare(name, needs, "memory:", script);
    });
}

/// Its index of the log is a file that is never read or written, only mapped.
#[test]
fn a_wal_database_has_many_writers() {
    let script = r#"
        sqlite3 db 'pragma journal_mode=wal; create table t(a integer primary key, b);' > /dev/null
        # Somebody reads all the time, and keeps the log.
        python3 -c '
import sqlite3, sys
db = sqlite3.connect("db", timeout=120)
list(db.execute("select count(*) from t")); print("open", flush=True); sys.stdin.readline()
seen = list(db.execute("select count(*), count(distinct b) from t"))
print(seen, list(db.execute("pragma integrity_check")), list(db.execute("pragma journal_mode")))
' < <(while [ ! -e done ]; do sleep 0.1; done; echo) > reader &
        reader=$!
        writers=
        for writer in 1 2 3 4; do
            for i in $(seq 12); do
                echo ".timeout 120000"
                echo "begin immediate; insert into t(b) values('$writer-$i-a'), ('$writer-$i-b'); commit;"
            done | sqlite3 db & writers="$writers $!"
        done
        # One process is killed during its work.
        (echo ".timeout 120000"; while :; do echo "insert into u values(1);"; done) 2>/dev/null |
            sqlite3 db 'create table if not exists u(a);' '.read /dev/stdin' 2>/dev/null & victim=$!; disown
        sleep 0.5; kill -9 $victim 2>/dev/null; wait $writers; echo > done; wait $reader
        cat reader; rm reader done
        sqlite3 db 'select count(*) from t; pragma integrity_check;'; rm db*
    "#;
    compare("sqlite3", &["sqlite3", "python3"], "memory:", script);
    compare("sqlite3", &["sqlite3", "python3"], "passthrough:SRC,backing=off", script);
}

#[test]
fn processes_are_created_while_threads_work() {
    compare_c("spawns", include_str!("run/spawns.c"), run_everywhere);
}

/// posix_spawn(3) returned 0 where its child could not begin, and what a child of vfork(2) leaves
/// in a variable of its parent, as busybox does, was lost.
#[test]
fn failures_of_children_are_told_as_natively() {
    compare_c("failures", include_str!("run/failures.c"), run_everywhere);
    compare_c("failures", include_str!("run/failures.c"), |name, needs, script| {
        compare_with(&["--dispatch"], name, needs, "memory:", script);
    });
    compare_static("failures, static", include_str!("run/failures.c"), |name, needs, script| {
        compare_with(&["--dispatch"], name, needs, "memory:", script);
    });
}

#[test]
fn killed_children_do_not_affect_their_parent() {
    compare_c("kills", include_str!("run/kills.c"), run_everywhere);
}

/// Unnamed files and removed directories stay open across execve(2) if the run serves the mount.
/// Unused ones are released.
#[test]
fn open_files_survive_execve() {
    compare_c("programs", include_str!("run/programs.c"), |name, needs, script| {
        // Only a file system in memory reports the number of files in use.
        let counts = "[ $PWD != /defuse-test ] || export COUNTS=1";
        compare(name, needs, "memory:", &format!("{counts}; {script}"));
    });
}

#[test]
fn an_unknown_c_library_is_served_through_its_functions() {
    compare_c("plain.c", include_str!("run/plain.c"), run_everywhere);
    compare_c("plain.c", include_str!("run/plain.c"), run_by_symbols);
}

#[test]
fn interrupted_calls_behave_as_natively() {
    compare_c("interrupts.c", include_str!("run/interrupts.c"), run_everywhere);
}

#[test]
fn threads_are_cancelled_as_natively() {
    compare_c("cancels.c", include_str!("run/cancels.c"), run_everywhere);
}

/// Programs on glibc 2.41 made no files: all calls in which a thread can be cancelled go through
/// one function of that C library, whose call gets its number as an argument, and which was not
/// replaced.
#[test]
fn calls_with_a_number_in_a_register_are_served_and_interrupted_as_natively() {
    compare_c("bridge.c", include_str!("run/bridge.c"), run_everywhere);
}

#[test]
fn programs_can_use_thousands_of_descriptors() {
    compare_c("many.c", include_str!("run/many.c"), run_everywhere);
}

#[test]
fn file_changes_are_notified_as_natively() {
    compare_c("watches.c", include_str!("run/watches.c"), run_on_passthrough);
}

/// The kernel cannot watch a file without a backing file, and programs get an error.
#[test]
fn files_in_memory_cannot_be_watched() {
    if !is_there("python3") {
        println!("skipped: python3 is not installed");
        return;
    }
    let script = "import ctypes, errno; c = ctypes.CDLL(None, use_errno=True); i = c.inotify_init(); \
                  print(c.inotify_add_watch(i, b'.', 2), errno.errorcode[ctypes.get_errno()])";
    let place = TestPlace::new();
    let run = ["run", "-C", "/defuse-test", "--mount", "/defuse-test=memory:", "--"];
    let seen = finish(place.command(&[&run[..], &["python3", "-c", script]].concat()));
    assert_eq!((seen.out.as_str(), seen.err.as_str()), ("-1 ENOSPC\n", ""));
}

#[test]
fn a_full_table_of_descriptors_is_full_at_the_same_number() {
    compare_c("full", include_str!("run/full.c"), run_everywhere);
}

/// On files that were opened before execve(2), ftruncate(2) and similar calls failed with `EBADF`,
/// and cp(1) took `/dev/stdin` and fifos for replaced files. Limits of file size and seccomp
/// filters broke every execve(2), and programs that lowered their limit of descriptors closed those
/// of the library.
#[test]
fn inherited_files_keep_all_their_abilities() {
    compare_c("inherited", include_str!("run/inherited.c"), run_everywhere);
    let script = r#"
        echo hi > f; cp /dev/stdin x < f; cp /dev/fd/4 y 4< f; cat x y; dd if=f of=/dev/stdout conv=fsync > z 2> e
        cat z; dd if=f conv=fsync 2> e > w; cat w; rm e; mkfifo p; (echo through > p &); cp p copy 2> e; cat copy
        rm e; cp --reflink=always f g 2> e; grep -c address e; rm -f e g
    "#;
    run_everywhere("what is opened once more", &["bash"], script);
}

/// True for root. Otherwise prints that the test is skipped.
fn may_become_others() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root can become another user");
    }
    is_root
}

#[test]
fn each_thread_has_its_own_credentials() {
    if !may_become_others() {
        return;
    }
    compare_c("users", include_str!("run/users.c"), run_everywhere);
}

/// A directory that root has searched a moment ago is closed to another user of the same process,
/// and to everyone after its mode has changed.
#[test]
fn a_directory_that_another_user_has_searched_is_closed() {
    if !may_become_others() {
        return;
    }
    let script = r#"chmod 755 .; mkdir -p d/e; echo x > d/e/f; python3 -c "
import errno, os, subprocess
def look(who):
    for _ in range(3):
        for call in (os.stat, lambda path: open(path).read(), os.listdir):
            try: call('d/e/f' if call is not os.listdir else 'd/e/.')
            except OSError as error: print(who, errno.errorcode[error.errno])
            else: print(who, 'may')
for dir in ('d', 'd/e'):
    for mode in (0o755, 0o711, 0o700, 0o755):
        subprocess.run(['chmod', oct(mode)[2:], dir]); print(dir, oct(mode))
        for _ in range(2):
            look('root'); os.seteuid(65534); look('other'); os.seteuid(0)
""#;
    run_everywhere("searched directories", &["python3"], script);
}

/// The kernel itself changes files whose descriptors programs have, by the rules that it has for
/// all files.
#[test]
fn an_open_file_is_changed_by_the_rights_of_its_user() {
    if !may_become_others() {
        return;
    }
    let script = r#"python3 -c "
import errno, os, resource, signal
os.chmod('.', 0o755)
def do(what, change, *args):
    try: result = change(*args)
    except OSError as error: result = errno.errorcode[error.errno]
    print(what, args[1:], result)
def show(fd):
    for st in (os.fstat(fd), os.stat('f')):
        print(oct(st.st_mode), st.st_uid, st.st_gid, st.st_size, st.st_mtime_ns == 2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
for how in (os.O_RDWR, os.O_RDONLY, os.O_RDWR | os.O_APPEND):
    fd = os.open('f', how | os.O_CREAT, 0o640)
    for uid in (0, 65534, 0):
        os.seteuid(uid)
        for mode in (0o6755, 0o640): do('fchmod', os.fchmod, fd, mode); show(fd)
        do('fchmod', os.fchmod, fd, 0o6755); do('write', os.write, fd, b'x'); show(fd)
        do('fchown', os.fchown, fd, 65534, 65534); show(fd)
        do('fchown', os.fchown, fd, -1, 0); show(fd)
        do('utime', lambda fd: os.utime(fd, ns=(1, 2)), fd); do('utime', os.utime, fd); show(fd)
        for size in (5000, 3, 1 << 21): do('truncate', os.ftruncate, fd, size); show(fd)
        do('allocate', os.posix_fallocate, fd, 0, 9000); do('sync', os.fsync, fd); do('sync', os.fdatasync, fd)
        show(fd)
""#;
    run_everywhere("changes of open files", &["python3"], script);
}

/// truncate(2), sendfile(2), splice(2) and copy_file_range(2) had the error of a limit without its
/// signal.
#[test]
fn a_limit_of_file_sizes_has_its_signal_for_every_way_to_write() {
    let script = r#"python3 -c "
import errno, os, resource, signal
signals = []
signal.signal(signal.SIGXFSZ, lambda *_: signals.append('XFSZ'))
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY))
src = os.open('src', os.O_RDWR | os.O_CREAT); os.write(src, b's' * 10000)
fd = os.open('f', os.O_RDWR | os.O_CREAT)
appending = os.open('f', os.O_WRONLY | os.O_APPEND)
into, out = os.pipe(); os.write(out, b'p' * 12000)
def do(what, change, *args):
    signals.clear()
    try: result = change(*args)
    except OSError as error: result = errno.errorcode[error.errno]
    print(what, result, signals, os.fstat(fd).st_size)
    os.ftruncate(fd, 0); os.lseek(fd, 0, 0); os.lseek(src, 0, 0)
do('write', os.write, fd, b'x' * 20000)
do('pwrite', os.pwrite, fd, b'x' * 20000, 9000)
do('pwrite behind', os.pwrite, fd, b'x', 10000)
do('writev', os.writev, fd, [b'x' * 6000] * 3)
do('append', os.write, appending, b'x' * 20000)
do('ftruncate', os.ftruncate, fd, 10001)
do('truncate', os.truncate, 'f', 10001)
do('fallocate', os.posix_fallocate, fd, 0, 10001)
do('sendfile', lambda: (os.lseek(fd, 5000, 0), os.sendfile(fd, src, 0, 9000))[1])
do('splice', os.splice, into, fd, 12000)
do('copy_file_range', os.copy_file_range, src, fd, 9000, 0, 5000)
do('copy_file_range behind', os.copy_file_range, src, fd, 9000, 0, 10000)
do('sendfile to the end', os.sendfile, appending, src, 0, 5)
do('copy of a directory', os.copy_file_range, os.open('.', 0), fd, 5)
""#;
    run_everywhere("limits of file sizes", &["python3"], script);
}

#[test]
fn a_file_is_read_by_the_rights_of_its_reader() {
    if !may_become_others() {
        return;
    }
    let script = r#"
        chmod 755 .; for mode in 000 040 004 400 640; do echo $mode > $mode; chmod $mode $mode; done
        for user in "--reuid 65534 --regid 65534" "--reuid 65534 --regid 0" "--bounding-set=-all --inh-caps=-all"; do
            for mode in 000 040 004 400 640; do setpriv $user --clear-groups cat $mode; done
        done; cat 000"#;
    run_everywhere("readers", &["setpriv"], script);
}

/// A program executed after root has become another user accesses the mounts as that user.
#[test]
fn a_program_of_another_user_has_the_rights_of_that_user() {
    if !may_become_others() {
        return;
    }
    let script = r#"
        chmod 777 .; mkdir own; chmod 700 own; touch own/x; echo secret > s; chmod 600 s; echo open > o
        other="setpriv --reuid 65534 --regid 65534 --clear-groups"; exec 5< s
        $other cat o s; $other ls own; $other touch own/y
        $other bash -c 'id -u; cat o; (cat o); cat <&5; echo mine > m; stat -c "%u %g %a" m; chmod 644 s
            echo more >> o; mv o p; mv p o; ln s t; bash -c "exec cat s"; { cat m; cat s; } | sort'
        python3 -c "import os; os.setgid(65534); os.setuid(65534); os.execlp('cat', 'cat', 'o', 's')"
        python3 -c "
import os, subprocess
f = open('s'); print(subprocess.run(['cat', '/dev/stdin'], stdin=f, user=65534, group=65534).returncode)
print(subprocess.run('cat o; cat s', shell=True, user=65534, group=65534, extra_groups=[]).returncode)"
        su nobody -s /bin/sh -c 'cat o; cat s; id -un'
        chmod 1777 .; $other rm -f o m; ls
    "#;
    compare("setpriv, su and python3", &["setpriv", "python3", "su"], "memory:", script);
}

/// `memory:` and `uhs:` kept set-group-id of a file that its group may not execute, whatever user
/// changed the file: clearing it depends on the groups of the caller.
#[test]
fn set_id_bits_are_cleared_by_each_change_and_each_user_as_natively() {
    if !may_become_others() {
        return;
    }
    let script = include_str!("run/set_group_id.py");
    let script = format!("cat > script.py <<'END'\n{script}\nEND\n/usr/bin/python3 script.py");
    let needs = ["setpriv", "/usr/bin/python3"];
    for mount in ["passthrough:SRC", "passthrough:SRC,backing=off", "memory:"] {
        compare("set-id bits", &needs, mount, &script);
    }
    let place = TestPlace::new();
    place.expect_success(&["mkfs", "uhs", "image", "--size", "64M"]);
    compare("set-id bits", &needs, &format!("uhs:{}", place.path("image").display()), &script);
}

/// The server of a run refuses clients that name a connection that does not exist, even a program
/// of the run that has become another user.
#[test]
fn another_user_cannot_connect_to_a_run() {
    // An interpreter that users other than root may execute.
    let python = "/usr/bin/python3";
    let is_there = is_there("setpriv") && Path::new(python).exists();
    if !rustix::process::geteuid().is_root() || !is_there {
        println!("skipped: needs root, {python} and setpriv");
        return;
    }
    // Sends INIT with the number of a connection that does not exist, and prints the reply.
    let script = r#"
import os, socket, struct, sys
heir, number, uid = map(int, sys.argv[1:])
fds = ['/proc/self/fd/' + fd for fd in os.listdir('/proc/self/fd')]
path = [fd for fd in fds if os.path.islink(fd) and os.readlink(fd).endswith('/socket (deleted)')][0]
os.setgroups([]); os.setgid(uid); os.setuid(uid)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(60)
s.connect(path)
names = [0, 0, heir] + [number] * 8
init = struct.pack("IIIII11I", 7, 38, 0, 0, 0, *names)
s.send(struct.pack("IIQQIIIHH", 40 + len(init), 26, 2, 0, 0, 0, 0, 0, 0) + init)
try: print("an answer" if s.recv(4096) else "nothing")
except ConnectionResetError: print("nothing")
"#;
    let place = TestPlace::new();
    let ask = |predecessor: &str, number: &str, uid: &str| {
        let mut run =
            place.command(&["run", "--mount", "mem:=memory:", "--", python, "-c", script]);
        run.args([predecessor, number, uid]);
        let seen = finish(run);
        seen.out + &seen.err
    };
    let other = "65534";
    let answers = [("0", "0"), ("0", "7"), ("1", "7")]
        .map(|(predecessor, number)| ask(predecessor, number, other));
    assert_eq!(answers, ["nothing\n"; 3]);
    assert_eq!(ask("0", "0", "0"), "an answer\n", "otherwise this proves nothing");
}

#[test]
fn the_heap_of_the_program_is_not_used() {
    compare_c("heap", include_str!("run/heap.c"), run_everywhere);
}

#[test]
fn system_calls_without_the_c_library_behave_as_natively() {
    compare_c("raw", include_str!("run/raw.c"), run_dispatched);
}

/// With dispatch, on one mount, which is enough if the calls are the same on all mounts.
fn run_once(name: &str, needs: &[&str], script: &str) {
    compare_with(&["--dispatch"], name, needs, "passthrough:SRC,backing=off", script);
}

#[test]
fn static_programs_behave_as_natively() {
    compare_static("raw, static", include_str!("run/raw.c"), run_dispatched);
    compare_static("forks, static", include_str!("run/forks.c"), run_once);
    compare_static("threads, static", include_str!("run/threads.c"), run_once);
    compare_static("endings, static", include_str!("run/endings.c"), run_once);
    compare_static("stacks, static", include_str!("run/stacks.c"), run_once);
    compare_static("mappings, static", include_str!("run/mappings.c"), run_once);
    compare_static("full, static", include_str!("run/full.c"), run_once);
    compare_static("kills, static", include_str!("run/kills.c"), run_once);
}

#[test]
fn a_static_busybox_does_what_it_does_natively() {
    let script = include_str!("run/busybox.sh").replace('\'', "'\\''");
    run_dispatched("busybox", &["busybox"], &format!("busybox sh -c '{script}'"));
    // From static to dynamic programs and back, and through a script.
    let script = "printf '#!/bin/busybox sh\necho script $1; bash -c \"echo dynamic; busybox echo static\"' > s
        chmod +x s; ./s 1; busybox sh -c './s 2; exec ./s 3'; busybox env | grep DEFUSE
        mkdir d; cp /bin/busybox d; ./d/busybox echo own; d/busybox sh -c 'readlink /proc/self/exe'; rm -r d";
    run_dispatched("busybox", &["busybox", "bash"], script);
}

/// A static program in Go, compiled with these `options`; `None` without a compiler.
fn go_program(place: &TestPlace, code: &str, options: &[&str]) -> Option<std::path::PathBuf> {
    let go = ["go", "/usr/local/go/bin/go"].into_iter().find(|go| is_there(go));
    let Some(go) = go else {
        println!("skipped: go is not installed");
        return None;
    };
    let (source, program) = (place.path("main.go"), place.path("program"));
    fs::write(&source, code).unwrap();
    let mut compiler = Command::new(go);
    compiler.arg("build").args(options).arg("-o").arg(&program).arg(&source);
    compiler.env("CGO_ENABLED", "0").env("GO111MODULE", "off").env("GOCACHE", place.path("cache"));
    assert!(compiler.status().unwrap().success(), "the program does not compile");
    Some(program)
}

#[test]
fn programs_in_go_do_what_they_do_natively() {
    // Stripped programs, too, have the table of functions. One that can be loaded anywhere has a
    // loader, and no library.
    for options in [&[][..], &["-ldflags=-s -w"], &["-buildmode=pie"]] {
        let place = TestPlace::new();
        let code = include_str!("run/program.go");
        let Some(program) = go_program(&place, code, options) else { return };
        run_dispatched("go", &[], &program.display().to_string());
    }
}

/// A call of a Go program took 35 times as long as natively, also if it concerned no files: each
/// was dispatched by a signal.
#[test]
fn calls_of_go_programs_that_concern_no_files_need_no_signal() {
    let place = TestPlace::new();
    let Some(program) = go_program(&place, include_str!("run/passed.go"), &[]) else { return };
    let run = ["run", "--dispatch", "-C", "/defuse-test", "--mount", "/defuse-test=memory:", "--"];
    let seen = finish({
        let mut run = place.command(&run);
        run.arg(&program);
        run
    });
    assert_eq!((seen.out.as_str(), seen.err.as_str()), ("true true\ntext <nil>\n", ""));
}

#[test]
fn dispatch_does_not_disturb_other_calls() {
    compare_c("families", include_str!("run/families.c"), run_once);
    compare_c("threads", include_str!("run/threads.c"), run_once);
    compare_c("endings", include_str!("run/endings.c"), run_once);
    compare_c("stacks", include_str!("run/stacks.c"), run_once);
    compare_c("spawns", include_str!("run/spawns.c"), run_once);
    compare_c("heap", include_str!("run/heap.c"), run_once);
    let script = "echo hello > f; ls -l f | wc -l; find . | sort; (sleep 0.1; echo late) | cat
        trap 'echo caught' USR1; kill -USR1 $$; mkdir d; tar cf t d; tar tf t; rm t
        { bash -c 'kill -SYS $$; echo not'; } 2> /dev/null; echo $?";
    run_dispatched("bash", &["bash", "tar"], script);
}

#[test]
fn a_check_reports_the_intercepted_calls() {
    let place = TestPlace::new();
    let seen = finish(place.command(&["check", "ls"]));
    assert!(seen.out.contains("libc.so.6") && seen.code == Some(0), "{seen:?}");
    if !is_there("gcc") {
        println!("skipped: gcc is not installed");
        return;
    }
    let (source, program) = (place.path("t.c"), place.path("t"));
    fs::write(&source, "int main() { return 0; }").unwrap();
    let mut compiler = Command::new("gcc");
    let status = compiler.args(["-static", "-o"]).arg(&program).arg(&source).status().unwrap();
    if !status.success() {
        println!("skipped: there is no static C library");
        return;
    }
    let seen = finish(place.command(&["check", program.to_str().unwrap()]));
    assert!(seen.out.contains("linked statically") && seen.code == Some(1), "{seen:?}");
    assert!(seen.out.contains("with --dispatch all are served"), "{seen:?}");
    assert!(seen.err.contains("defuse run --dispatch"), "{seen:?}");
}

/// They ran on the kernel's files of these names.
#[test]
fn a_program_that_cannot_load_the_library_is_refused() {
    let place = TestPlace::new();
    let refused = |command: &[&str], parts: &[&str]| {
        let seen = finish(place.command(&[&["run", "--mount", "mem:=memory:"], command].concat()));
        assert!(parts.iter().all(|part| seen.err.contains(part)), "{seen:?}");
        assert!(seen.code != Some(0) && seen.out.is_empty(), "{seen:?}");
    };
    refused(&["--frok", "deny", "--", "true"], &["--frok", "--help"]);
    refused(&["--", "/etc/passwd"], &["/etc/passwd", "executable?"]);
    if !is_there("gcc") {
        println!("skipped: gcc is not installed");
        return;
    }
    let source = place.path("t.c");
    fs::write(&source, "int main() { return 0; }").unwrap();
    for (how, why) in [
        ("-static", "linked statically"),
        ("-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1", "its loader is /lib/ld-musl-x86_64.so.1"),
    ] {
        let program = place.path("t");
        let mut compiler = Command::new("gcc");
        compiler.args([how, "-o"]).arg(&program).arg(&source);
        if !compiler.status().unwrap().success() {
            println!("not here: {how}: gcc cannot link so");
            continue;
        }
        let program = program.to_str().unwrap();
        refused(&["--", program], &[program, why, "defuse mount"]);
        let seen = finish(place.command(&["check", program]));
        assert!(seen.out.contains(why) && seen.code == Some(1), "{seen:?}");
    }
}

/// A database with its files in memory waited for reads that the kernel had refused.
#[test]
fn asynchronous_reads_work_if_the_kernel_supports_them() {
    if !is_there("gcc") {
        println!("skipped: gcc is not installed");
        return;
    }
    let place = TestPlace::new();
    let (source, program) = (place.path("t.c"), place.path("t"));
    let code = r#"
        #define _GNU_SOURCE
        #include <errno.h>
        #include <stdio.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        int main() {
            unsigned long context = 0;
            int aio = syscall(SYS_io_setup, 1, &context) == 0 ? 0 : errno;
            // Without parameters the call is refused, if the kernel implements the call.
            int rings = syscall(SYS_io_uring_setup, 1, 0) >= 0 ? 0 : errno;
            printf("%d %d\n", aio == ENOSYS, rings == ENOSYS);
        }
    "#;
    fs::write(&source, code).unwrap();
    let mut compiler = Command::new("gcc");
    assert!(compiler.args(["-o"]).arg(&program).arg(&source).status().unwrap().success());
    let native = finish(Command::new(&program)).out;
    let backed = format!("/defuse-test=passthrough:{}", place.path("src").display());
    let unbacked = format!("{backed},backing=off");
    for (mounts, expected) in [
        (&[&backed][..], native.as_str()),
        (&[&unbacked], "1 1\n"),
        (&[&backed, &"mem:=memory:".to_owned()], "1 1\n"),
    ] {
        let mut run = place.command(&["run"]);
        mounts.iter().for_each(|mount| _ = run.args(["--mount", mount.as_str()]));
        run.arg("--").arg(&program);
        assert_eq!(finish(run).out, expected, "{mounts:?}");
    }
}

/// dlopen(3) was not exported, and the message of dlerror(3) was lost before it was printed: the
/// first write(2) of a program looked the next function up in the loader.
#[test]
fn libraries_are_loaded_from_mounts_and_loader_errors_are_kept() {
    let script = r#"
        cat > l.c <<'END'
int seven(void) { return 7; }
END
        cat > m.c <<'END'
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main() {
    char *here = realpath("l.so", 0);
    void *library = dlopen(here, RTLD_NOW);
    int (*seven)(void) = library ? dlsym(library, "seven") : 0;
    printf("%d\n", seven ? seven() : -1);
    fflush(stdout);
    dlopen("/no/such/library.so", RTLD_NOW);
    char *why = dlerror();
    FILE *file = fopen("why", "w");
    fprintf(file, "%s\n", why);
    fclose(file);
    puts(why);
    return 0;
}
END
        gcc -shared -fPIC -o l.so l.c && gcc -o m m.c -ldl && ./m; cat why; rm -f l.so m
    "#;
    run_everywhere("dlopen", &["gcc"], script);
}

/// No code depends on the name of a program.
#[test]
fn no_program_is_recognized_by_its_name() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../preload/src");
    // One test lists the programs whose calls it examines.
    let root = fs::read_to_string(folder.join("lib.rs")).unwrap();
    assert!(root.contains("#[cfg(test)]\nmod coverage;"));
    let mut folders = vec![folder];
    let names =
        ["bash", "git", "tar", "rsync", "python", "perl", "gcc", "make", "vim", "sqlite3", "comm"];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if path.ends_with("coverage.rs") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for word in text.split('"').skip(1).step_by(2) {
                let named = word.split(|c: char| !c.is_alphanumeric()).any(|w| names.contains(&w));
                assert!(!named, "{}: \"{word}\" names a program", path.display());
            }
        }
    }
}
