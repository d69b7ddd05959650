//! Runs a workload in a new directory.

#![allow(dead_code, reason = "not every test file uses everything")]

use std::path::{Path, PathBuf};

use defuse_wml::{
    LoadOptions, RunFailure, RunReport, RunSettings, SystemCallDriver, execute, load,
};

/// Runs `text` with `$dir` set to a new directory below `dir`. The text must not set it.
pub fn run(dir: &Path, text: &str) -> RunReport {
    try_run(dir, text).unwrap_or_else(|failure| panic!("{failure}")).remove(0)
}

/// Runs a workload like [`run`], for workloads that may fail.
pub fn try_run(dir: &Path, text: &str) -> Result<Vec<RunReport>, RunFailure> {
    let text = format!("set $dir=\"{}\"\n{text}", dir.display());
    let plan =
        load(&text, "test.f", &LoadOptions::default()).unwrap_or_else(|wrong| panic!("{wrong}"));
    execute(&plan, &SystemCallDriver, RunSettings::default(), &())
}

/// A workload of one thread that repeats `flowops` on the set `s`.
pub fn one_thread(set: &str, flowops: &str) -> String {
    format!(
        "set mode quit alldone\n\
         define fileset name=s,path=$dir,dirgamma=0,{set}\n\
         define fileset name=nothing,path=$dir,entries=1\n\
         define process name=p {{ thread name=t {{ {flowops}\n\
         flowop statfile name=end,filesetname=nothing }} }}\nrun\n"
    )
}

/// All files below `dir`, with their sizes, in order.
pub fn files(dir: &Path) -> Vec<(PathBuf, u64)> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir(dir) else { return found };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push((path.clone(), path.metadata().unwrap().len()));
        }
    }
    found.sort();
    found
}
