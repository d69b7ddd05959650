//! The effect of each flowop on files, and its counts.

mod common;

use common::{files, one_thread, run, try_run};
use defuse_wml::RunReport;

/// Runs one thread on one set. Returns its counts and the sizes of the files afterwards.
fn run_flowops(set: &str, flowops: &str) -> (RunReport, Vec<u64>) {
    let dir = tempfile::tempdir().unwrap();
    let report = run(dir.path(), &one_thread(set, flowops));
    (report, files(dir.path()).into_iter().map(|(_, size)| size).collect())
}

/// Operations and bytes of the flowop `name`.
fn count(report: &RunReport, name: &str) -> (u64, u64) {
    let flowop = report.flowop(name).unwrap_or_else(|| panic!("no {name}"));
    (flowop.operations, flowop.bytes)
}

#[test]
fn files_have_eight_digits_and_directories_their_width() {
    let dir = tempfile::tempdir().unwrap();
    let flowops = "flowop delay name=d,value=0";
    run(dir.path(), &one_thread("entries=7,size=3k,dirwidth=3,prealloc", flowops));
    let names: Vec<String> = files(&dir.path().join("s"))
        .iter()
        .map(|(path, size)| {
            assert_eq!(*size, 3072);
            path.strip_prefix(dir.path()).unwrap().display().to_string()
        })
        .collect();
    let wanted: Vec<String> = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1)]
        .iter()
        .map(|(directory, file)| format!("s/{directory:08}/{file:08}"))
        .collect();
    assert_eq!(names, wanted);
}

#[test]
fn trees_are_as_deep_as_the_logarithm_of_their_entries() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &one_thread("entries=30,size=0,dirwidth=3,prealloc", "flowop delay value=0"));
    for (path, _) in files(&dir.path().join("s")) {
        // log(30) / log(3) is 3.1: the root is one level, so there are two more and the file.
        assert_eq!(path.strip_prefix(dir.path().join("s")).unwrap().iter().count(), 3);
    }
}

#[test]
fn createfile_makes_files_that_do_not_exist_and_their_directories() {
    let flowops = "flowop createfile name=c,filesetname=s,fd=1\nflowop closefile name=x,fd=1";
    let dir = tempfile::tempdir().unwrap();
    let text = one_thread("entries=5,size=8k,dirwidth=2", flowops)
        .replace("flowop statfile name=end,filesetname=nothing", "");
    let report = run(dir.path(), &text);
    assert_eq!((count(&report, "c"), count(&report, "x")), ((5, 0), (5, 0)));
    assert_eq!(files(dir.path()).len(), 5);
}

#[test]
fn read_continues_at_its_position_and_restarts_at_the_end() {
    let (report, _) = run_flowops(
        "entries=1,size=10k,prealloc",
        "flowop openfile name=o,filesetname=s,fd=1\nflowop read name=r,fd=1,iosize=4k,iters=5",
    );
    // 4, 4, 2, 0 (and back to the beginning), 4.
    assert_eq!(count(&report, "r"), (5, 14 << 10));
}

#[test]
fn io_on_a_closed_descriptor_opens_a_file_and_counts_it() {
    let (report, _) = run_flowops(
        "entries=1,size=8k,prealloc",
        "flowop read name=r,filesetname=s,iosize=4k,fd=3",
    );
    assert_eq!(count(&report, "r"), (2, 4096));
}

#[test]
fn random_reads_never_reach_beyond_the_end() {
    let (report, _) = run_flowops(
        "entries=1,size=10k,prealloc",
        "flowop read name=r,filesetname=s,random,iosize=4k,iters=200",
    );
    // Offsets are 0 and 4096, so that each read is complete.
    assert_eq!(count(&report, "r"), (201, 200 * 4096));
}

#[test]
fn writes_continue_at_their_position_and_random_ones_stay_within_the_file() {
    let open = "flowop openfile name=o,filesetname=s,fd=1\n";
    let (report, sizes) = run_flowops(
        "entries=1,size=8k,prealloc",
        &format!("{open}flowop write name=w,fd=1,iosize=3k,iters=4"),
    );
    assert_eq!((count(&report, "w"), sizes), ((4, 12 << 10), vec![12 << 10]));
    let (report, sizes) = run_flowops(
        "entries=1,size=8k,prealloc",
        &format!("{open}flowop write name=w,fd=1,random,iosize=3k,iters=50"),
    );
    assert_eq!((count(&report, "w"), sizes), ((50, 150 << 10), vec![8 << 10]));
}

#[test]
fn a_working_set_bounds_random_offsets() {
    let (_, sizes) = run_flowops(
        "entries=1,size=0,prealloc",
        "flowop write name=w,filesetname=s,random,workingset=64k,iosize=4k,iters=500",
    );
    // Offsets are rounded down, so that the last one is almost never used, as in Filebench.
    assert!([60 << 10, 64 << 10].contains(&sizes[0]), "{sizes:?}");
}

#[test]
fn whole_files_are_read_from_the_beginning_to_the_end() {
    for (iosize, flowops) in [("", 10), ("iosize=4k,", 10), ("iosize=1m,", 10)] {
        let (report, _) = run_flowops(
            "entries=2,size=10000,prealloc",
            &format!(
                "flowop openfile name=o,filesetname=s,fd=1\n\
                 flowop readwholefile name=r,{iosize}fd=1,iters={flowops}\nflowop closefile fd=1"
            ),
        );
        assert_eq!(count(&report, "r"), (flowops, flowops * 10_000));
    }
}

#[test]
fn whole_files_are_written_to_the_size_of_the_set_or_of_the_source() {
    let (report, sizes) = run_flowops(
        "entries=1,size=10000",
        "flowop createfile name=c,filesetname=s,fd=1\n\
         flowop writewholefile name=w,fd=1,iosize=4k\nflowop closefile name=x,fd=1",
    );
    assert_eq!((count(&report, "w"), sizes), ((1, 10_000), vec![10_000]));
    let dir = tempfile::tempdir().unwrap();
    let text = one_thread(
        "entries=1,size=5000,prealloc",
        "flowop openfile filesetname=s,fd=1
        flowop createfile name=c,filesetname=other,fd=2
        flowop writewholefile name=w,fd=2,srcfd=1",
    )
    .replace(
        "define process",
        "define fileset name=other,path=$dir,entries=1,size=100\ndefine process",
    );
    assert_eq!(count(&run(dir.path(), &text), "w"), (1, 5000));
}

#[test]
fn appends_go_to_the_end() {
    let (report, sizes) = run_flowops(
        "entries=1,size=1000,prealloc",
        "flowop openfile name=o,filesetname=s,fd=1\nflowop appendfile name=a,fd=1,iosize=300,iters=3",
    );
    assert_eq!((count(&report, "a"), sizes), ((3, 900), vec![1900]));
}

#[test]
fn random_appends_write_less_than_their_size_and_count_when_they_write_nothing() {
    let (report, sizes) = run_flowops(
        "entries=1,size=0,prealloc",
        "flowop openfile name=o,filesetname=s,fd=1\n\
         flowop appendfilerand name=a,fd=1,iosize=1000,iters=400\n\
         flowop appendfilerand name=zero,fd=1,iosize=1,iters=5",
    );
    let (operations, bytes) = count(&report, "a");
    assert_eq!(operations, 400);
    assert!((150_000..250_000).contains(&bytes), "{bytes}");
    assert_eq!((count(&report, "zero"), sizes), ((5, 0), vec![bytes]));
}

#[test]
fn deletefile_deletes_in_rotation_or_the_file_of_its_descriptor() {
    let (report, sizes) =
        run_flowops("entries=5,size=1,prealloc", "flowop deletefile name=d,filesetname=s,iters=3");
    assert_eq!((count(&report, "d"), sizes.len()), ((3, 0), 2));
    let (report, sizes) = run_flowops(
        "entries=5,size=1,prealloc",
        "flowop openfile name=o,filesetname=s,fd=1\nflowop closefile name=c,fd=1\n\
         flowop deletefile name=d,fd=1",
    );
    assert_eq!((count(&report, "d"), sizes.len()), ((1, 0), 4));
}

#[test]
fn a_file_that_is_open_is_not_deleted_and_not_counted() {
    let (report, sizes) = run_flowops(
        "entries=1,size=1,prealloc",
        "flowop openfile name=o,filesetname=s,fd=1\nflowop deletefile name=d,filesetname=s",
    );
    assert_eq!((count(&report, "d"), sizes.len()), ((0, 0), 1));
}

#[test]
fn statfile_and_fsync_and_fsyncset_count() {
    let (report, _) = run_flowops(
        "entries=3,size=1,prealloc",
        "flowop statfile name=by-name,filesetname=s,iters=4\n\
         flowop openfile name=o1,filesetname=s,fd=1\nflowop openfile name=o2,filesetname=s,fd=2\n\
         flowop statfile name=by-fd,fd=1\nflowop fsync name=f,fd=1\n\
         flowop fsyncset name=fs,filesetname=s",
    );
    let names = ["by-name", "by-fd", "f", "fs"];
    assert_eq!(names.map(|name| count(&report, name).0), [4, 1, 1, 2]);
}

#[test]
fn directories_are_created_removed_and_listed() {
    let dir = tempfile::tempdir().unwrap();
    let text = one_thread(
        "entries=3,size=0,dirwidth=3,leafdirs=4,prealloc=0",
        "flowop makedir name=m,filesetname=s,iters=4\nflowop rmdir name=r,filesetname=s,iters=1",
    );
    let report = run(dir.path(), &text);
    assert_eq!((count(&report, "m"), count(&report, "r")), ((4, 0), (1, 0)));
    let (report, _) = run_flowops(
        "entries=10,size=0,dirwidth=10,prealloc",
        "flowop listdir name=l,filesetname=s,iters=2",
    );
    // The root has one name of eight characters, the directory below it ten.
    assert_eq!(count(&report, "l"), (2, 88));
}

#[test]
fn an_index_picks_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let flowops = "flowop deletefile name=d,filesetname=s,indexed=12";
    run(dir.path(), &one_thread("entries=10,size=1,dirwidth=10,prealloc", flowops));
    let names = files(dir.path());
    assert_eq!(names.len(), 9);
    assert!(!names.iter().any(|(path, _)| path.ends_with("00000003")), "12 % 10 is the third");
}

#[test]
fn opennext_uses_one_descriptor_after_the_other() {
    let (report, _) = run_flowops(
        "entries=4,size=4k,prealloc",
        "flowop read name=r,filesetname=s,opennext,iosize=4k,iters=8",
    );
    // Four are opened, and each is read twice, the second time at its end.
    assert_eq!(count(&report, "r"), (12, 4 * 4096));
}

#[test]
fn composite_flowops_have_iterations_and_variables() {
    let text = "define flowop name=pair,$which,$size=1k {
            flowop openfile name=o,filesetname=$which,fd=1
            flowop appendfile name=a,fd=1,iosize=$size
            flowop closefile name=c,fd=1
        }\n"
    .to_owned()
        + &one_thread(
            "entries=2,size=0,prealloc",
            "flowop pair name=p1,iters=3,$which=s\nflowop pair name=p2,$which=s,$size=10",
        );
    let dir = tempfile::tempdir().unwrap();
    let report = run(dir.path(), &text);
    assert_eq!(count(&report, "a"), (4, 3 * 1024 + 10));
    assert_eq!(count(&report, "c"), (4, 0));
}

#[test]
fn hog_and_delay_are_no_io() {
    let (report, _) =
        run_flowops("entries=1", "flowop hog name=h,value=1000\nflowop delay name=d,value=1");
    assert_eq!((count(&report, "h").0, count(&report, "d").0), (1, 1));
    assert_eq!(report.total.operations, 0);
    assert!(report.flowop("d").unwrap().min_ns >= 1_000_000_000);
}

#[test]
fn a_semaphore_passes_as_many_as_were_posted() {
    let dir = tempfile::tempdir().unwrap();
    let text = "set mode quit firstdone
        define fileset name=s,path=$dir,entries=100,size=10
        define fileset name=nothing,path=$dir,entries=1
        define process name=p {
            thread name=poster {
                flowop createfile name=c,filesetname=s,fd=1
                flowop sempost name=post,target=wait,value=1,blocking
                flowop closefile name=x,fd=1
            }
            thread name=waiter {
                flowop semblock name=wait,value=1,highwater=3
                flowop statfile name=st,filesetname=s
            }
        }
        run 20\n";
    let report = run(dir.path(), text);
    let (posted, waited) = (count(&report, "post").0, count(&report, "wait").0);
    assert_eq!(count(&report, "c").0, 100);
    // The poster is never further ahead than highwater.
    assert!(posted == 100 && waited >= 96 && waited <= posted + 1, "{posted} {waited}");
}

#[test]
fn a_wakeup_wakes_blocked_threads() {
    let dir = tempfile::tempdir().unwrap();
    let text = "set mode quit alldone
        define fileset name=nothing,path=$dir,entries=1
        define process name=p {
            thread name=sleeper,instances=3 {
                flowop block name=b
                flowop statfile name=end,filesetname=nothing
            }
            thread name=waker {
                flowop delay name=d,value=1
                flowop wakeup name=w,target=b
                flowop statfile name=end2,filesetname=nothing
            }
        }
        run 20\n";
    let report = run(dir.path(), text);
    assert_eq!((count(&report, "b").0, count(&report, "w").0), (3, 1));
    assert!(report.seconds < 15.0);
}

#[test]
fn direct_and_synchronous_io_work_on_aligned_memory() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let text = one_thread(
        "entries=1,size=64k,prealloc",
        "flowop openfile name=o,filesetname=s,fd=1,directio,dsync\n\
         flowop write name=w,fd=1,random,iosize=4k,iters=10",
    );
    match try_run(dir.path(), &text) {
        Ok(reports) => assert_eq!(count(&reports[0], "w"), (10, 40 << 10)),
        Err(failure) if failure.errno == Some(22) => eprintln!("not here: no O_DIRECT here"),
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn rate_limits_wait_for_events_and_do_nothing_without() {
    let flowops = "flowop openfile name=o,filesetname=s,fd=1\n\
                   flowop opslimit name=l\nflowop closefile name=c,fd=1";
    let text = one_thread("entries=1,size=1,prealloc", flowops)
        .replace("flowop statfile name=end,filesetname=nothing", "flowop finishoncount value=90");
    let dir = tempfile::tempdir().unwrap();
    let free = run(dir.path(), &text);
    assert_eq!(free.flowop("l").unwrap().operations, 0);
    let limited = run(dir.path(), &format!("eventgen rate=50\n{text}"));
    // 90 operations at 50 a second; the events of the first second may be available at once.
    assert!(limited.flowop("l").unwrap().operations > 10);
    assert!(limited.seconds > 0.5 && limited.seconds > free.seconds, "{}", limited.seconds);
}
