//! Statements and attributes in existing workload files that no other test covers.

mod common;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::{files, one_thread, run, try_run};
use defuse_wml::plan::FlowopOpenFlags;
use defuse_wml::{
    LoadOptions, OpenAccess, RunReport, RunSettings, SystemCallDriver, WorkloadDriver,
    WorkloadPlan, execute, load,
};

fn plan(text: &str) -> WorkloadPlan {
    load(text, "test.f", &LoadOptions::default()).unwrap_or_else(|wrong| panic!("{wrong}"))
}

fn operations(report: &RunReport, name: &str) -> u64 {
    report.flowop(name).map_or(0, |flowop| flowop.operations)
}

#[test]
fn set_evaluates_an_operation_on_two_numbers() {
    for (expression, value) in
        [("$n * $m", 600), ("$n + 5", 25), ("$n - $m", 0), ("$m / 4", 7), ("2k*3", 6144), ("7", 7)]
    {
        let text = format!(
            "set $n=20\nset $m=30\nset $all = {expression}\n\
             define fileset name=s,path=/tmp,entries=1,filesize=$all"
        );
        match load(&text, "test.f", &LoadOptions::default()) {
            Ok(plan) => assert_eq!(plan.data_bytes(), value, "{expression}"),
            // A size cannot be negative; the position is the position of the attribute, not of the
            // sum.
            Err(wrong) => assert!(value == 0 && wrong.to_string().contains("-10"), "{wrong}"),
        }
    }
    // A path that begins with a slash is not a division.
    assert_eq!(plan("set $dir=/tmp\nset $n=3\n").filesets.len(), 0);
}

#[test]
fn a_file_for_the_prompt_runs_if_a_duration_is_given() {
    let text = "set $dir=/nowhere
        define fileset name=s,path=$dir,entries=2,size=1,prealloc
        define process name=p { thread name=t { flowop statfile name=st,filesetname=s } }
        usage \"set \\$dir=<dir> defaults to $dir\"
        debug 1\n";
    assert!(!plan(text).runs());
    let with = |text: &str, run_seconds| {
        let options = LoadOptions { run_seconds, ..LoadOptions::default() };
        load(text, "test.f", &options).unwrap_or_else(|wrong| panic!("{wrong}"))
    };
    assert!(with(text, Some(1)).runs());
    let dir = tempfile::tempdir().unwrap();
    let text = text.replace("/nowhere", &dir.path().display().to_string());
    let reports =
        execute(&with(&text, Some(1)), &SystemCallDriver, RunSettings::default(), &()).unwrap();
    assert!(reports.len() == 1 && operations(&reports[0], "st") > 0);
    // A file with a run statement runs once.
    let own = format!("{text}run 1\n");
    let reports =
        execute(&with(&own, Some(1)), &SystemCallDriver, RunSettings::default(), &()).unwrap();
    assert_eq!(reports.len(), 1);
}

#[test]
fn a_wakeup_that_comes_just_before_the_block_is_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    // Two threads hand a token to each other. Nothing slows them down, so each often wakes the
    // other before it blocks.
    let text = "set mode quit firstdone
        define process name=p {
            thread name=a {
                flowop wakeup name=wa,target=bb
                flowop block name=ba
                flowop finishoncount name=f,value=5000,target=ba
            }
            thread name=b {
                flowop block name=bb
                flowop wakeup name=wb,target=ba
            }
        }
        run 60\n";
    let report = run(dir.path(), text);
    assert!(operations(&report, "ba") >= 5000 && report.seconds < 50.0, "{}", report.seconds);
}

#[test]
fn lathist_gives_every_flowop_its_histogram() {
    let dir = tempfile::tempdir().unwrap();
    let text = one_thread(
        "entries=8,size=1,prealloc",
        "flowop openfile name=o,filesetname=s,fd=1\nflowop closefile name=c,fd=1",
    );
    assert!(run(dir.path(), &text).flowop("o").unwrap().histogram.is_empty());
    let report = run(dir.path(), &format!("enable lathist\n{text}"));
    let open = report.flowop("o").unwrap();
    assert_eq!(open.histogram.iter().map(|(_, count)| count).sum::<u64>(), open.operations);
    assert!(report.to_string().contains("    from "));
}

#[test]
fn readonly_and_writeonly_determine_how_files_are_opened() {
    let dir = tempfile::tempdir().unwrap();
    for (access, flowop, fails) in [
        ("readonly", "write", true),
        ("readonly", "read", false),
        ("writeonly", "read", true),
        ("writeonly", "write", false),
    ] {
        let text = one_thread(
            &format!("entries=1,size=4k,prealloc,{access}"),
            &format!(
                "flowop openfile name=o,filesetname=s,fd=1\n\
                 flowop {flowop} name=x,fd=1,iosize=1k\nflowop closefile name=c,fd=1"
            ),
        );
        let result = try_run(dir.path(), &text);
        assert_eq!(result.is_err(), fails, "{access} {flowop}");
        if let Err(failure) = result {
            assert!(failure.errno == Some(9), "{failure}");
        }
    }
}

#[test]
fn a_trusted_tree_is_not_checked() {
    let dir = tempfile::tempdir().unwrap();
    let body = "flowop statfile name=st,filesetname=s,iters=4";
    run(dir.path(), &one_thread("entries=4,size=2k,prealloc", body));
    let made = files(dir.path());
    // Sizes that differ from the plan are not noticed, and the files are kept.
    let path = made[0].0.clone();
    std::fs::write(&path, b"longer than nothing").unwrap();
    let report = run(dir.path(), &one_thread("entries=4,size=2k,prealloc,trusttree", body));
    assert_eq!(operations(&report, "st"), 4);
    assert_eq!(std::fs::read(&path).unwrap(), b"longer than nothing");
    // With `reuse`, sizes are checked.
    run(dir.path(), &one_thread("entries=4,size=2k,prealloc,reuse", body));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2048);
}

#[test]
fn depths_and_sizes_come_from_their_distributions() {
    let dir = tempfile::tempdir().unwrap();
    let body = "flowop statfile name=st,filesetname=s";
    let depth = |set: &str| {
        let text = one_thread(set, body);
        run(dir.path(), &format!("set $deep=randvar(type=uniform,min=4,mean=4)\n{text}"));
        let all = files(&dir.path().join("s"));
        let depths = all
            .iter()
            .map(|(path, _)| path.strip_prefix(dir.path().join("s")).unwrap().components().count());
        (depths.collect::<Vec<_>>(), all.into_iter().map(|(_, size)| size).collect::<Vec<_>>())
    };
    let (deep, same) = depth("entries=6,size=3k,dirwidth=2,dirdepthrv=$deep,prealloc");
    assert!(deep.iter().all(|depth| *depth == 4), "{deep:?}");
    assert!(same.iter().all(|size| *size == 3072));
    let (_, sizes) = depth("entries=50,size=8k,filesizegamma=1500,dirwidth=50,prealloc");
    let different: std::collections::BTreeSet<u64> = sizes.iter().copied().collect();
    assert!(different.len() > 25, "{different:?}");
}

/// Makes system calls, and counts the hints to the page cache and to read-ahead.
#[derive(Default)]
struct HintCountingDriver {
    forgotten: AtomicU64,
    no_readahead: AtomicU64,
}

impl WorkloadDriver for HintCountingDriver {
    type File = OwnedFd;

    fn open(&self, path: &Path, access: OpenAccess, flags: FlowopOpenFlags) -> io::Result<OwnedFd> {
        self.no_readahead.fetch_add(u64::from(flags.no_readahead), Relaxed);
        SystemCallDriver.open(path, access, flags)
    }
    fn read(&self, file: &mut OwnedFd, data: &mut [u8]) -> io::Result<usize> {
        SystemCallDriver.read(file, data)
    }
    fn read_at(&self, file: &mut OwnedFd, data: &mut [u8], offset: u64) -> io::Result<usize> {
        SystemCallDriver.read_at(file, data, offset)
    }
    fn write(&self, file: &mut OwnedFd, data: &[u8]) -> io::Result<usize> {
        SystemCallDriver.write(file, data)
    }
    fn write_at(&self, file: &mut OwnedFd, data: &[u8], offset: u64) -> io::Result<usize> {
        SystemCallDriver.write_at(file, data, offset)
    }
    fn rewind(&self, file: &mut OwnedFd) -> io::Result<()> {
        SystemCallDriver.rewind(file)
    }
    fn seek_end(&self, file: &mut OwnedFd) -> io::Result<()> {
        SystemCallDriver.seek_end(file)
    }
    fn fsync(&self, file: &mut OwnedFd) -> io::Result<()> {
        SystemCallDriver.fsync(file)
    }
    fn size_of(&self, file: &mut OwnedFd) -> io::Result<u64> {
        SystemCallDriver.size_of(file)
    }
    fn truncate(&self, file: &mut OwnedFd, size: u64) -> io::Result<()> {
        SystemCallDriver.truncate(file, size)
    }
    fn forget_pages(&self, file: &mut OwnedFd) {
        self.forgotten.fetch_add(1, Relaxed);
        SystemCallDriver.forget_pages(file);
    }
    fn stat(&self, path: &Path) -> io::Result<u64> {
        SystemCallDriver.stat(path)
    }
    fn unlink(&self, path: &Path) -> io::Result<()> {
        SystemCallDriver.unlink(path)
    }
    fn mkdir(&self, path: &Path) -> io::Result<()> {
        SystemCallDriver.mkdir(path)
    }
    fn rmdir(&self, path: &Path) -> io::Result<()> {
        SystemCallDriver.rmdir(path)
    }
    fn list(&self, path: &Path, each: &mut dyn FnMut(&[u8], bool)) -> io::Result<()> {
        SystemCallDriver.list(path, each)
    }
}

#[test]
fn hints_to_the_page_cache_are_given_if_the_file_says_so() {
    let dir = tempfile::tempdir().unwrap();
    for (cached, flag, forgotten, no_readahead) in [
        ("cached=true", "noreadahead", 0, 3),
        ("cached=false", "noreadahead=false", 3, 0),
        ("cached", "fd=2", 0, 0),
        ("paralloc", "fd=2", 3, 0),
    ] {
        let body = format!(
            "flowop openfile name=o,filesetname=s,{flag}\nflowop closefile name=c{}\n",
            if flag == "fd=2" { ",fd=2" } else { "" }
        );
        let text = one_thread(&format!("entries=3,size=64k,prealloc,{cached}"), &body.repeat(3));
        let text = format!("set $dir=\"{}\"\n{text}", dir.path().display());
        let driver = HintCountingDriver::default();
        execute(&plan(&text), &driver, RunSettings::default(), &()).unwrap();
        let counts = (driver.forgotten.into_inner(), driver.no_readahead.into_inner());
        assert_eq!(counts, (forgotten, no_readahead), "{cached} {flag}");
    }
}

#[test]
fn rate_limits_count_their_target_only() {
    let dir = tempfile::tempdir().unwrap();
    let with = |limit: &str| {
        let text = format!(
            "eventgen rate=40
             define fileset name=s,path=$dir,entries=1,size=2m,prealloc
             define process name=p {{ thread name=t {{
                 flowop read name=r,filesetname=s,iosize=1m
                 flowop statfile name=st,filesetname=s
                 flowop {limit} name=l,target=r
                 flowop finishoncount name=f,value=70,target=r }} }}
             run 60\n"
        );
        run(dir.path(), &text)
    };
    for limit in ["iopslimit", "bwlimit", "opslimit"] {
        let report = with(limit);
        assert!(operations(&report, "r") >= 70, "{limit}");
        // 70 events at 40 a second, of which the events of one second may be available at once.
        assert!(report.seconds > 0.5 && report.seconds < 50.0, "{limit}: {}", report.seconds);
    }
}

#[test]
fn statements_of_the_prompt_work() {
    let dir = tempfile::tempdir().unwrap();
    let text = "define fileset name=s,path=$dir,entries=2,size=1,prealloc
        define process name=p { thread name=t { flowop statfile name=st,filesetname=s
            flowop finishoncount name=f,value=1,target=st } }
        set mode nousestats
        version
        usage \"nothing\"
        create processes
        create filesets
        sleep 0
        run 5
        shutdown processes
        shutdown filesets\n";
    let report = run(dir.path(), text);
    assert_eq!(operations(&report, "st"), 1);
    assert!(files(dir.path()).is_empty(), "the files were to be removed");
}
