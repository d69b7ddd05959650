//! The end of runs, repeatability, and files that a run must not touch.

mod common;

use std::sync::Mutex;

use common::{files, one_thread, run, try_run};
use defuse_wml::{
    LoadOptions, RunObserver, RunReport, RunSettings, SystemCallDriver, execute, load,
};

/// Threads that delete `entries` files; a second set never runs out.
fn make_deleting(mode: &str, run: &str) -> String {
    format!(
        "{mode}
         define fileset name=few,path=$dir,entries=5,size=1,prealloc
         define fileset name=many,path=$dir,entries=60,size=1,prealloc
         define process name=p,instances=1 {{
             thread name=a {{ flowop deletefile name=few,filesetname=few }}
             thread name=b {{ flowop deletefile name=many,filesetname=many }}
         }}
         {run}\n"
    )
}

fn counts(report: &RunReport) -> [u64; 2] {
    ["few", "many"].map(|name| report.flowop(name).unwrap().operations)
}

#[test]
fn alldone_ends_when_every_thread_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let report = run(dir.path(), &make_deleting("set mode quit alldone", "run"));
    assert_eq!(counts(&report), [5, 60]);
    assert!(files(dir.path()).is_empty());
}

#[test]
fn firstdone_ends_when_one_thread_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let text = make_deleting("set mode quit firstdone", "run")
        .replace("filesetname=many }", "filesetname=many\nflowop delay name=d,value=1 }");
    let [few, many] = counts(&run(dir.path(), &text));
    assert_eq!(few, 5);
    assert!(many < 10, "{many}");
}

#[test]
fn without_a_mode_a_flowop_without_a_file_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let failure = try_run(dir.path(), &make_deleting("", "run 10")).unwrap_err().to_string();
    assert!(failure.contains("found no file") && failure.contains("alldone"), "{failure}");
}

/// Threads that stat a file forever.
const FOREVER: &str = "define fileset name=s,path=$dir,entries=3,size=1,prealloc
    define process name=p,instances=2 { thread name=t,instances=2 {
        flowop statfile name=st,filesetname=s,iters=1000000000 } }\n";

#[test]
fn a_time_ends_a_run_even_in_the_middle_of_iterations() {
    let dir = tempfile::tempdir().unwrap();
    let report = run(dir.path(), &format!("{FOREVER}run 1\n"));
    assert!((1.0..20.0).contains(&report.seconds), "{}", report.seconds);
    assert_eq!(report.threads, 4);
    let total = &report.total;
    assert!(total.operations > 0 && total.p50_ns <= total.p99_ns && total.p99_ns <= total.max_ns);
    assert!(total.min_ns <= total.p50_ns && report.cpu_ns_per_operation > 0);
}

#[test]
fn a_timeout_ends_a_run_without_a_duration() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("set $dir=\"{}\"\n{FOREVER}run\n", dir.path().display());
    let plan = load(&text, "t.f", &LoadOptions::default()).unwrap();
    let settings = RunSettings {
        timeout: Some(std::time::Duration::from_millis(300)),
        ..RunSettings::default()
    };
    let reports = execute(&plan, &SystemCallDriver, settings, &()).unwrap();
    assert!(reports[0].seconds < 20.0);
}

#[derive(Default)]
struct RecordingObserver {
    periods: Mutex<Vec<u64>>,
    reported: Mutex<Vec<String>>,
}

impl RunObserver for RecordingObserver {
    fn interval(&self, report: &RunReport) {
        self.periods.lock().unwrap().push(report.total.operations);
    }
    fn echo(&self, text: &str) {
        self.reported.lock().unwrap().push(text.to_owned());
    }
}

fn run_observed(text: &str) -> (RecordingObserver, Vec<RunReport>) {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("set $dir=\"{}\"\n{text}", dir.path().display());
    let plan = load(&text, "t.f", &LoadOptions::default()).unwrap();
    let listener = RecordingObserver::default();
    let reports = execute(&plan, &SystemCallDriver, RunSettings::default(), &listener).unwrap();
    (listener, reports)
}

#[test]
fn statistics_restart_in_each_period_if_it_is_negative() {
    let (anew, reports) = run_observed(&format!("{FOREVER}psrun -1 3\n"));
    let total = reports[0].total.operations;
    let periods = anew.periods.into_inner().unwrap();
    assert!(periods.len() >= 2 && periods.iter().sum::<u64>() <= total, "{periods:?} {total}");
    let (grows, reports) = run_observed(&format!("{FOREVER}psrun 1 3\n"));
    let periods = grows.periods.into_inner().unwrap();
    assert!(periods.is_sorted() && *periods.last().unwrap() <= reports[0].total.operations);
}

#[test]
fn echo_shows_variables_and_quit_ends_the_file() {
    let (listener, reports) = run_observed("set $n=5k\necho \"n is $n\"\nquit\necho \"never\"\n");
    assert_eq!(listener.reported.into_inner().unwrap(), ["n is 5120"]);
    assert!(reports.is_empty());
}

#[test]
fn finishonbytes_ends_when_more_bytes_than_its_value_were_transferred() {
    let dir = tempfile::tempdir().unwrap();
    let text = "define fileset name=s,path=$dir,entries=1,size=0,prealloc
        define process name=p { thread name=t {
            flowop openfile name=o,filesetname=s,fd=1
            flowop appendfile name=a,fd=1,iosize=1k
            flowop closefile name=c,fd=1
            flowop finishonbytes name=f,value=10k } }
        run\n";
    let report = run(dir.path(), text);
    assert_eq!(report.flowop("a").unwrap().bytes, 11 << 10);
}

#[test]
fn finishoncount_counts_its_target_only() {
    let dir = tempfile::tempdir().unwrap();
    let text = "define fileset name=s,path=$dir,entries=1,size=1,prealloc
        define process name=p { thread name=t {
            flowop statfile name=often,filesetname=s,iters=7
            flowop statfile name=once,filesetname=s
            flowop finishoncount name=f,value=3,target=once } }
        run\n";
    let report = run(dir.path(), text);
    let count = |name| report.flowop(name).unwrap().operations;
    assert_eq!((count("often"), count("once"), count("f")), (21, 3, 3));
}

#[test]
fn the_same_seed_gives_the_same_files_and_another_one_does_not() {
    let sizes = |seed| {
        let dir = tempfile::tempdir().unwrap();
        let text = format!(
            "set $dir=\"{}\"
             set $size=cvar(type=cvar-gamma,parameters=mean:4000;gamma:1.5)
             define fileset name=s,path=$dir,entries=40,size=$size,dirwidth=4,prealloc=60
             create files\n",
            dir.path().display()
        );
        let plan = load(&text, "t.f", &LoadOptions { seed, ..LoadOptions::default() }).unwrap();
        execute(&plan, &SystemCallDriver, RunSettings::default(), &()).unwrap();
        let strip = |path: &std::path::Path| path.strip_prefix(dir.path()).unwrap().to_owned();
        files(dir.path()).iter().map(|(path, size)| (strip(path), *size)).collect::<Vec<_>>()
    };
    assert_eq!(sizes(1), sizes(1));
    assert_ne!(sizes(1), sizes(2));
    assert!((10..40).contains(&sizes(1).len()));
}

#[test]
fn reused_files_get_the_planned_size_and_others_are_created_again() {
    let dir = tempfile::tempdir().unwrap();
    let set = |more: &str| one_thread(&format!("entries=4,{more},prealloc"), "flowop hog value=1");
    run(dir.path(), &set("size=100"));
    let first = files(dir.path())[0].0.clone();
    let inode = || std::os::unix::fs::MetadataExt::ino(&first.metadata().unwrap());
    let before = inode();
    for size in [50, 200_000] {
        run(dir.path(), &set(&format!("size={size},reuse,paralloc")));
        assert!(files(dir.path()).iter().all(|(_, found)| *found == size));
        assert_eq!(inode(), before);
    }
}

#[test]
fn a_directory_with_other_files_is_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let mine = dir.path().join("s/00000001/precious");
    std::fs::create_dir_all(mine.parent().unwrap()).unwrap();
    std::fs::write(&mine, "data").unwrap();
    let text = one_thread("entries=4,size=1,prealloc", "flowop hog value=1");
    let failure = try_run(dir.path(), &text).unwrap_err().to_string();
    assert!(failure.contains("precious"), "{failure}");
    assert_eq!(std::fs::read(&mine).unwrap(), b"data");
}

#[test]
fn a_failing_flowop_ends_the_run_and_is_named_with_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let text = "define fileset name=s,path=$dir,entries=1,size=1,prealloc,readonly
        define process name=p { thread name=t {
            flowop openfile name=o,filesetname=s,fd=1
            flowop write name=wr,fd=1,iosize=1 } }
        run 10\n";
    let failure = try_run(dir.path(), text).unwrap_err();
    let text = failure.to_string();
    assert!(text.contains("wr (line 5)") && text.contains("00000001"), "{text}");
    assert_eq!(failure.errno, Some(9));
}

#[test]
fn shell_commands_run_if_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("made");
    let text = format!("system \"touch {}\"\nsystem \"exit 3\"\n", made.display());
    assert!(load(&text, "t.f", &LoadOptions::default()).is_err());
    let options = LoadOptions { allow_system: true, ..LoadOptions::default() };
    let plan = load(&text, "t.f", &options).unwrap();
    let failure = execute(&plan, &SystemCallDriver, RunSettings::default(), &()).unwrap_err();
    assert!(made.exists() && failure.to_string().contains("exit 3"), "{failure}");
}

#[test]
fn scaling_keeps_proportions_and_never_sizes_of_io() {
    let text = "set $dir=/nowhere
        define fileset name=large,path=$dir,entries=4,size=1g
        define fileset name=small,path=$dir,entries=100000,size=4k,prealloc
        define process name=p { thread name=t,instances=4 {
            flowop write name=w,filesetname=large,iosize=1m,iters=1024,fd=1
            flowop statfile name=st,filesetname=small,iters=9
            flowop finishoncount name=f,value=50000 } }
        run\n";
    let options = LoadOptions { scale: 0.01, ..LoadOptions::default() };
    let plan = load(text, "t.f", &options).unwrap();
    let [large, small] = [&plan.filesets[0], &plan.filesets[1]];
    assert_eq!((large.entries, large.size.fixed_value()), (4, Some(10 << 20)));
    assert_eq!((small.entries, small.size.fixed_value()), (1000, Some(4096)));
    let changes = plan.scaling.changes.join("\n");
    for change in ["w: iters 10 instead of 1024", "f: ends at 500 instead of 50000"] {
        assert!(changes.contains(change), "{changes}");
    }
    assert!(!changes.contains("st:"), "{changes}");
}

#[test]
fn files_that_cannot_fit_are_refused_before_any_is_created() {
    let dir = tempfile::tempdir().unwrap();
    let text = |size: &str| {
        format!(
            "define fileset name=small,path=$dir,entries=2,size=1k,prealloc
             define fileset name=large,path=\"$dir/deeper\",entries=1000,size={size},prealloc=50
             define process name=p {{ thread name=t {{ flowop statfile name=st,filesetname=small
                 flowop finishoncount value=1,target=st }} }}
             run 1\n"
        )
    };
    let failure = try_run(dir.path(), &text("8t")).unwrap_err().to_string();
    assert!(failure.contains("deeper would take 4194304000 MiB"), "{failure}");
    assert!(failure.contains("nothing was made"), "{failure}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    try_run(dir.path(), &text("1k")).unwrap();
    // Existing files free their space; a larger size still does not fit.
    try_run(dir.path(), &text("1k")).unwrap();
    let before = files(dir.path());
    assert!(try_run(dir.path(), &text("8t")).is_err());
    assert_eq!(files(dir.path()), before);
}
