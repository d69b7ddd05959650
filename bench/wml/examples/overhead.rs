//! Measures the overhead of the engine: reads and writes of 4 KiB through it, and in a plain loop.
//!
//! `cargo run --release -p defuse-wml --example overhead -- DIR` measures alternately on a file in
//! DIR. It prints nanoseconds per operation and the ratio of the medians. Pin it with `taskset -c 1
//! chrt -f 10`.

use std::error::Error;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use defuse_wml::{LoadOptions, RunSettings, SystemCallDriver, execute, load};

const SIZE: u64 = 16 << 20;
const IO: usize = 4096;
const OPERATIONS: u64 = 400_000;
const ROUNDS: usize = 11;

fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::args().nth(1).ok_or("name a directory")?;
    for kind in ["read", "write"] {
        let (mut through, mut plain) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            through.push(engine(&dir, kind)?);
            plain.push(plain_loop(Path::new(&dir), kind == "write")?);
        }
        let (engine, plain) = (median(through), median(plain));
        let over = (engine / plain - 1.0) * 100.0;
        println!("{kind}: engine {engine:.1} ns, plain loop {plain:.1} ns, {over:+.1} %");
    }
    Ok(())
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Nanoseconds per operation of the engine.
fn engine(dir: &str, kind: &str) -> Result<f64, Box<dyn Error>> {
    let text = format!(
        "set mode quit alldone
         define fileset name=overhead,path=\"{dir}\",entries=1,size={SIZE},prealloc,reuse,cached
         define fileset name=nothing,path=\"{dir}\",entries=1
         define process name=p {{ thread name=t {{
             flowop openfile name=o,filesetname=overhead,fd=1
             flowop {kind} name=io,fd=1,random,iosize={IO},iters={OPERATIONS}
             flowop statfile name=end,filesetname=nothing
         }} }}
         run"
    );
    let plan = load(&text, "overhead.f", &LoadOptions::default())?;
    let reports = execute(&plan, &SystemCallDriver, RunSettings::default(), &())?;
    let operations = reports[0].flowop("io").map_or(1, |flowop| flowop.operations);
    Ok(reports[0].seconds * 1e9 / operations as f64)
}

/// Runs these operations in a loop with only a cheap choice of the offset.
fn plain_loop(dir: &Path, write: bool) -> Result<f64, Box<dyn Error>> {
    let path = dir.join("overhead/00000001/00000001");
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    // Page-aligned like the buffer of the engine, because the speed of copying depends on it.
    let mut memory = vec![1u8; 2 * IO];
    let skip = memory.as_ptr().align_offset(IO);
    let buffer = &mut memory[skip..skip + IO];
    let mut state = 1u64;
    let began = Instant::now();
    for _ in 0..OPERATIONS {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let offset = (state >> 33) % (SIZE / IO as u64) * IO as u64;
        if write {
            file.write_at(buffer, offset)?;
        } else {
            file.read_at(buffer, offset)?;
        }
    }
    Ok(began.elapsed().as_secs_f64() * 1e9 / OPERATIONS as f64)
}
