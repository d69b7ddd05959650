//! Errors are reported with file, line and column, and nothing is run or created.

mod common;

use defuse_wml::{LoadOptions, load};
use proptest::prelude::*;

/// A complete workload, of which each test changes one part.
const GOOD: &str = "set $dir=/tmp
set $n=10
define fileset name=s,path=$dir,entries=$n,size=4k,prealloc
define process name=p
{
  thread name=t,instances=2
  {
    flowop openfile name=o,filesetname=s,fd=1
    flowop read name=r,fd=1,iosize=1k,random
    flowop closefile name=c,fd=1
  }
}
run 1
";

fn mistake(text: &str) -> String {
    match load(text, "w.f", &LoadOptions::default()) {
        Ok(_) => panic!("this was accepted:\n{text}"),
        Err(mistake) => mistake.to_string(),
    }
}

#[test]
fn each_error_has_its_position_and_the_expected_text() {
    assert!(load(GOOD, "w.f", &LoadOptions::default()).is_ok());
    for (old, new, place, words) in [
        ("run 1", "rum 1", "w.f:13:1", "did you mean run?"),
        ("set $n=10", "set n=10", "w.f:2:5", "$variable"),
        ("set $n=10", "set $n=10x", "w.f:2:8", "whole number"),
        ("set $n=10", "set $n=1.5", "w.f:2:8", "whole number"),
        ("entries=$n", "entries=$m", "w.f:3:41", "$m is not set"),
        ("entries=$n", "entries=0", "w.f:3:41", "at least 1"),
        ("entries=$n", "entries=lots", "w.f:3:41", "entries is the text `lots`"),
        ("entries=$n", "entries=-5", "w.f:3:41", "not negative"),
        ("entries=$n", "entrys=$n", "w.f:3:33", "did you mean entries?"),
        ("size=4k", "size=9223372036854775807", "w.f:3:49", "possible size"),
        ("entries=$n", "entries=4g", "w.f:3:41", "at most 100000000"),
        ("entries=$n", "leafdirs=4g", "w.f:3:42", "at most 100000000"),
        ("iosize=1k", "iosize=1t", "w.f:9:36", "at most 16g"),
        ("prealloc", "prealloc=101", "w.f:3:61", "0 to 100"),
        ("path=$dir,", "", "w.f:3:1", "no path"),
        ("name=s,", "", "w.f:3:1", "no name"),
        ("name=s,", "name=a/b,", "w.f:3:21", "without slashes"),
        ("size=4k", "size=4k,size=5k", "w.f:3:52", "twice"),
        ("size=4k", "size", "w.f:3:44", "size is nothing"),
        ("instances=2", "instances=0", "w.f:6:27", "at least 1"),
        ("instances=2", "instances=99999", "w.f:4:1", "at most 65536"),
        ("instances=2", "ioprio=3", "w.f:6:24", "ionice"),
        ("instances=2", "memsize=512", "w.f:9:1", "memsize"),
        ("flowop openfile", "flowop openfiel", "w.f:8:12", "did you mean openfile?"),
        ("flowop openfile", "flowop aiowrite", "w.f:8:12", "POSIX aio"),
        ("filesetname=s,", "filesetname=z,", "w.f:8:40", "no file set `z`"),
        ("filesetname=s,", "", "w.f:8:12", "without filesetname"),
        ("read name=r,fd=1", "read name=r,fd=2", "w.f:9:12", "nothing opens descriptor 2"),
        ("read name=r,fd=1", "read name=r,fd=999", "w.f:9:27", "0 to 127"),
        ("iosize=1k", "iosize=8k", "w.f:9:1", "at most the size of a file"),
        ("iosize=1k,", "", "w.f:9:12", "without iosize"),
        ("iosize=1k", "iosize=true", "w.f:9:36", "iosize is true"),
        ("random", "random=7", "w.f:9:46", "true or false"),
        ("random", "rundom", "w.f:9:39", "did you mean random?"),
        ("    flowop closefile name=c,fd=1\n", "    flowop finishoncount\n", "w.f:10:12", "value"),
        (
            "    flowop closefile name=c,fd=1\n",
            "    flowop sempost target=x\n",
            "w.f:10:27",
            "semblock",
        ),
        ("  }\n}\nrun 1\n", "  }\n", "w.f:12:1", "the file ends"),
        ("run 1", "system \"rm -rf /\"", "w.f:13:1", "--allow-system"),
        ("run 1", "enable multi", "w.f:13:1", "one machine"),
        ("run 1", "domultisync value=1", "w.f:13:1", "one machine"),
        ("run 1", "stats snap", "w.f:13:1", "which is refused; expected `run SECONDS`"),
        ("run 1", "warmup 5", "w.f:13:1", "whose result is ignored"),
        ("run 1", "foreach $n in 1,2 { run 1 }", "w.f:13:1", "for each value"),
        ("run 1", "log \"x\"", "w.f:13:1", "echo"),
        ("run 1", "list flowop", "w.f:13:1", "docs/workloads.md"),
        ("run 1", "enable latency", "w.f:13:8", "one of lathist, multi"),
        ("run 1", "debug loudly", "w.f:13:7", "the level"),
        ("set $n=10", "set $n=10 *", "w.f:3:1", "a number or a $variable"),
        ("set $n=10", "set $n=10 / 0", "w.f:2:13", "no division by 0"),
        ("set $n=10", "set $n=4611686018427387904 * 2", "w.f:2:30", "below 2^63"),
        ("set $n=10", "set $n=$dir * 2", "w.f:2:8", "the text `/tmp`"),
        ("size=4k", "trusttree=5", "w.f:3:54", "true or false"),
        ("size=4k", "dirdepthrv=5", "w.f:3:55", "a random variable"),
        ("flowop openfile", "flowop aiowait", "w.f:8:12", "POSIX aio"),
        ("flowop openfile", "flowop print", "w.f:8:12", "echo before run"),
        ("run 1", "psrun -10 -5", "w.f:13:11", "not negative"),
        ("run 1", "set mode quit soon", "w.f:13:15", "alldone, firstdone, timeout"),
        ("run 1", "echo hello", "w.f:13:6", "\"string\""),
        ("run 1", "echo \"hello", "w.f:13:6", "never ends"),
        ("run 1", "run $x", "w.f:13:5", "$x is not set"),
        ("run 1", "create everything", "w.f:13:8", "one of file"),
        ("run 1", "?", "w.f:13:1", "'?'"),
        ("set $n=10", "set $n=cvar(type=cvar-gama)", "w.f:2:18", "did you mean cvar-gamma?"),
        (
            "set $n=10",
            "set $n=cvar(type=cvar-gamma,parameters=men:5)",
            "w.f:2:40",
            "did you mean mean?",
        ),
        ("set $n=10", "set $n=cvar(type=cvar-gamma,parameters=mean:x)", "w.f:2:40", "mean:NUMBER"),
        (
            "set $n=10",
            "set $n=cvar(type=cvar-gamma,parameters=mean:-1)",
            "w.f:2:40",
            "distribution",
        ),
        ("set $n=10", "set $n=randvar(type=tabular)", "w.f:2:8", "randtable"),
        (
            "set $n=10",
            "set $n=randvar(type=tabular,randtable={{50,1,2}})",
            "w.f:2:39",
            "add up to 50",
        ),
    ] {
        assert!(GOOD.contains(old), "{old}");
        let found = mistake(&GOOD.replacen(old, new, 1));
        assert!(found.starts_with(place), "{new}: {found}, not {place}");
        assert!(found.contains(words), "{new}: {found}, not {words}");
    }
}

#[test]
fn nothing_is_created_when_a_later_line_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let text = GOOD.replace("/tmp", &dir.path().display().to_string());
    mistake(&text.replace("run 1", "create files\nrun 1\nrum"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn variables_of_the_command_line_must_be_set_in_the_file() {
    let with = |text: &str| {
        let options = LoadOptions { variables: vec![text.to_owned()], ..LoadOptions::default() };
        load(GOOD, "w.f", &options)
    };
    assert_eq!(with("n=3").unwrap().filesets[0].entries, 3);
    assert!(with("m=3").unwrap_err().to_string().contains("does not set $m"));
    assert!(with("dri=3").unwrap_err().to_string().contains("did you mean dir?"));
    assert!(with("n=3 run 5").unwrap_err().to_string().contains("-D n=3 run 5"));
    assert!(with("n").is_err() && with("").is_err() && with("n=").is_err());
}

#[test]
fn an_invalid_scale_is_refused() {
    for scale in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let options = LoadOptions { scale, ..LoadOptions::default() };
        assert!(load(GOOD, "w.f", &options).is_err(), "{scale}");
    }
}

#[test]
fn composite_flowops_that_never_end_are_refused() {
    let text = GOOD.replace(
        "define process",
        "define flowop name=again { flowop again name=x }\ndefine process",
    );
    let found = mistake(&text.replace("flowop openfile name=o,filesetname=s,fd=1", "flowop again"));
    assert!(found.contains("nested"), "{found}");
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in ".{0,200}") {
        let _ = load(&text, "w.f", &LoadOptions::default());
    }

    #[test]
    fn no_change_of_a_valid_text_makes_the_parser_panic(
        at in 0..GOOD.len(),
        length in 0usize..20,
        new in "[a-z0-9$={}(),\"# \n-]{0,8}",
    ) {
        let end = (at + length).min(GOOD.len());
        let text = format!("{}{new}{}", &GOOD[..at], &GOOD[end..]);
        let _ = load(&text, "w.f", &LoadOptions::default());
    }
}
