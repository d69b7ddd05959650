//! The rules of the project's structure, as ARCHITECTURE.md and STYLE.md state them.

#[path = "structure/house.rs"]
mod house;
#[path = "structure/kinds.rs"]
mod kinds;
#[path = "structure/layers.rs"]
mod layers;
#[path = "structure/names.rs"]
mod names;
#[path = "structure/project.rs"]
mod project;
#[path = "structure/source.rs"]
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use project::{WorkspaceCrate, packages, relative, root, sources};
use source::{code_only, has_word};

/// The only files with unsafe code.
const UNSAFE_FILES: &[&str] = &[
    // The functions of libgfapi, and what they point to.
    "backends/gluster/src/ffi.rs",
    "backends/gluster/src/file.rs",
    "backends/gluster/src/transfer.rs",
    "backends/gluster/src/upcalls/events.rs",
    "backends/gluster/src/volume.rs",
    // A descriptor that a program inherits, between fork(2) and exec(2).
    "backends/remote/src/program.rs",
    // A page that the kernel empties in children.
    "process/src/lib.rs",
    // System calls that rustix lacks: the user of a peer, signals of a thread.
    "backends/remote/src/sys.rs",
    // System calls that rustix lacks: file handles, identities of threads, locks.
    "backends/passthrough/src/sys.rs",
    // Memory that a device uses while its owner waits, and a memfd that is mapped.
    "block/src/blocking.rs",
    "block/src/memory.rs",
    "block/src/region.rs",
    // The mask of signals of a thread.
    "block/src/signals.rs",
    // An allocator of mappings.
    "hugepages/src/alloc.rs",
    "hugepages/src/mapping.rs",
    "hugepages/src/page.rs",
    // mbind(2), which rustix lacks.
    "block/src/worker/memory.rs",
    // Submissions to io_uring(7), which point to memory.
    "block/src/file/buffers.rs",
    "block/src/file/queue.rs",
    "block/tests/cases/mod.rs",
    // Memory that a controller reads and writes at any time.
    "nvme/src/dma.rs",
    // ioctl(2) of VFIO, and registers that are mapped.
    "nvme/src/vfio/iommu.rs",
    "nvme/src/vfio/registers.rs",
    "nvme/src/vfio/sys.rs",
    // The functions that C calls, and the pointers that it gives.
    "capi/src/calls/aio.rs",
    "capi/src/calls/attributes.rs",
    "capi/src/calls/data.rs",
    "capi/src/calls/directory.rs",
    "capi/src/calls/locks.rs",
    "capi/src/calls/mapping.rs",
    "capi/src/calls/mount.rs",
    "capi/src/calls/names.rs",
    "capi/src/calls/open.rs",
    "capi/src/calls/status.rs",
    "capi/src/calls/storage.rs",
    "capi/src/calls/workdir.rs",
    "capi/src/calls/xattrs.rs",
    "capi/src/mappings.rs",
    "capi/src/memory.rs",
    // Buffers of Python.
    "python/src/buffers.rs",
    // The functions of libfuse, which C calls, and the pointers that programs give.
    "libfuse/src/abi.rs",
    "libfuse/src/args.rs",
    "libfuse/src/buffers.rs",
    "libfuse/src/calls.rs",
    "libfuse/src/cmdline.rs",
    "libfuse/src/connection.rs",
    "libfuse/src/context.rs",
    "libfuse/src/daemon.rs",
    "libfuse/src/handle.rs",
    "libfuse/src/logging.rs",
    "libfuse/src/low/abi.rs",
    "libfuse/src/low/calls.rs",
    "libfuse/src/low/data.rs",
    "libfuse/src/low/dispatch.rs",
    "libfuse/src/low/entries.rs",
    "libfuse/src/low/notify.rs",
    "libfuse/src/low/port.rs",
    "libfuse/src/low/reply.rs",
    "libfuse/src/low/requests.rs",
    "libfuse/src/low/session.rs",
    "libfuse/src/low/wake.rs",
    "libfuse/src/signals.rs",
    "libfuse/three/src/calls.rs",
    "libfuse/two/src/calls.rs",
    "libfuse/two/src/channels.rs",
    "libfuse/two/src/compat.rs",
    // System calls that a daemon must not make, which no library has.
    "cli/tests/attacks/filter.rs",
    // ioctl(2) of /dev/fuse: backing files.
    "session/src/backing.rs",
    // A descriptor that mount.fuse3(8) hands over by its number.
    "frontends/fuse/src/mount.rs",
    // ioctl(2) of loop devices.
    "frontends/fuse/src/mount/loop_device.rs",
    // getsockopt(2): the groups of a peer.
    "frontends/socket/src/peer.rs",
    // The mask of signals and the descriptors of a new process.
    "session/src/process.rs",
    // ioctl(2) of /dev/fuse: a clone of the descriptor.
    "session/src/transport/dev.rs",
    // Submissions to io_uring(7), which point to memory.
    "session/src/transport/uring/ring.rs",
    // sigaction(2) and tgkill(2).
    "session/src/workers/signal.rs",
    // prctl(2): syscall user dispatch of a thread.
    "preload/src/catch/user_dispatch.rs",
    // Frames of signals, which are the kernel's and the program's.
    "preload/src/catch/delivery.rs",
    // Assembly that passed system calls go through.
    "preload/src/catch/dispatch.rs",
    // The assembly that a trampoline leads to.
    "preload/src/catch/entry.rs",
    // The C library's list of variables.
    "preload/src/catch/environment.rs",
    // The kernel's record of an interrupted thread.
    "preload/src/catch/frame.rs",
    // Functions of the C library, by their names.
    "preload/src/catch/next.rs",
    // Machine code of loaded libraries.
    "preload/src/catch/go_entry.rs",
    "preload/src/catch/patch.rs",
    // sigaltstack(2).
    "preload/src/catch/signal_state.rs",
    // Handlers of signals.
    "preload/src/catch/signals.rs",
    // The function that the loader calls.
    "preload/src/catch/start.rs",
    // Programs that are mapped, and jumped to.
    "preload/src/catch/statics.rs",
    // The functions that the library exports.
    "preload/src/catch/symbols.rs",
    // Thread-local variables of ours in static programs, and the bases of FS and GS.
    "preload/src/catch/tls_block.rs",
    // Exported functions that make a program another user.
    "preload/src/catch/unwrapped.rs",
    "preload/src/catch/users.rs",
    // Descriptors that are inherited by their numbers.
    "preload/src/machine/descriptors.rs",
    // Memory that is not from the program's heap.
    "preload/src/machine/heap.rs",
    // States of other threads.
    "preload/src/machine/inside.rs",
    // A lock that a child may take by force.
    "preload/src/machine/lock.rs",
    // rt_sigprocmask(2).
    "preload/src/machine/mask.rs",
    // The record of a signal that waits.
    "preload/src/machine/pending.rs",
    // A thread's stack for our code.
    "preload/src/machine/stack.rs",
    // System calls, and the memory of the program that makes them.
    "preload/src/machine/sys.rs",
    // A key of the C library, to notice the end of a thread.
    "preload/src/machine/thread_exit.rs",
    // Assembly of calls that signals end.
    "preload/src/machine/wait.rs",
    // poll(2) of a pidfd.
    "preload/src/process/arena.rs",
    // A thread's own credentials, and the calls that read them.
    "preload/src/process/credentials.rs",
    // A page by which children know themselves.
    "preload/src/process/fork.rs",
    // Memory that all processes of a run share.
    "preload/src/process/run_memory.rs",
    // The one state of the process.
    "preload/src/process/state.rs",
    // prlimit(2).
    "preload/src/process/zone.rs",
    // Memory that two processes share.
    "ring/src/memory.rs",
    // Record locks, mappings and child processes, for the POSIX cases.
    "testkit/src/posix/sys.rs",
    // Allocators that count.
    "backends/uhs/tests/allocations.rs",
    "testkit/tests/direct_allocations.rs",
];

/// The crates in which a frontend may meet a backend.
const COMPOSERS: &[&str] =
    &["compose", "preload", "capi", "python", "cli", "bench", "testkit", "xtask"];

/// The workload engine. It is beside the benchmark, but depends on no competitor and no frontend,
/// so that the program can use it.
const WORKLOADS: &str = "bench/wml";

/// The tools for measurements, which know nothing of file systems.
const MEASURE: &str = "bench/measure";

/// The crates that may use the workload engine.
const USES_WORKLOADS: &[&str] = &["bench", "bench/program", "bench/uhs", "bench/wml-direct", STUDY];

/// The study. It mounts by running the program, and so needs no frontend and no backend.
const STUDY: &str = "bench/study";

/// The crates that may use the study.
const USES_STUDY: &[&str] = &["bench/program"];

/// A doc comment must not open with one of these words: it begins with its subject (see STYLE.md).
const QUESTIONS: &[&str] = &["What", "Who", "Which", "Whether", "Whose"];

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Fails with all complaints at once.
fn complain(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

/// The layer of a crate, by its folder.
fn layer(folder: &str) -> &str {
    let first = folder.split('/').next().unwrap_or(folder);
    match folder {
        WORKLOADS => "workloads",
        STUDY => "study",
        MEASURE => "measure",
        _ if COMPOSERS.contains(&first) => "composer",
        _ => first,
    }
}

#[test]
fn dependencies_point_from_frontends_and_backends_to_the_contract() {
    let packages = packages();
    let folders: BTreeMap<&str, &str> =
        packages.iter().map(|p| (p.name.as_str(), p.folder.as_str())).collect();
    let mut complaints = Vec::new();
    for package in &packages {
        let allowed: &[&str] = match layer(&package.folder) {
            "fs" => &[],
            "backends" if package.folder == "backends/remote" => {
                &["fs", "probe", "process", "wire", "ring"]
            }
            "backends" if package.folder == "backends/uhs" => {
                &["fs", "probe", "block", "hugepages"]
            }
            "backends"
                if ["backends/memory", "backends/gluster"].contains(&package.folder.as_str()) =>
            {
                &["fs", "hugepages"]
            }
            "probe" | "backends" => &["fs"],
            "wire" => &["fs", "probe"],
            // A layer for clients in other processes, whatever protocol they speak.
            "connection" => &["fs", "probe", "hugepages"],
            // Requests of the FUSE protocol to a file system, for the kernel mount and for sockets.
            "session" => &["fs", "probe", "wire"],
            "frontends" if package.folder == "frontends/fuse" => {
                &["fs", "probe", "wire", "session"]
            }
            "frontends" if package.folder == "frontends/socket" => {
                &["fs", "probe", "wire", "session", "connection"]
            }
            "frontends" if package.folder == "frontends/shared" => {
                &["fs", "probe", "wire", "session", "connection", "ring", "cache"]
            }
            "frontends" if package.folder == "frontends/direct" => &["fs", "probe", "process"],
            "frontends" | "trace" => &["fs", "probe"],
            // Workloads know a file system through its contract at most.
            "workloads" => &["fs"],
            "measure" | "block" | "ring" | "cache" | "hugepages" | "process" => &[],
            "nvme" => &["block"],
            "study" => &["probe", "trace", "workloads", "measure"],
            // The file systems are those of other programs.
            "libfuse" => &["fs", "wire", "frontends", "libfuse"],
            "composer" => continue,
            other => {
                complaints.push(format!("{other}/ has no place in the dependency rule"));
                continue;
            }
        };
        for dependency in &package.dependencies {
            let Some(folder) = folders.get(dependency.name.as_str()) else { continue };
            if !allowed.contains(&layer(folder)) && *folder != package.folder {
                let (name, kind) = (&package.name, &dependency.kind);
                complaints.push(format!("{name} must not depend on {folder} ({kind})"));
            }
        }
    }
    complain(complaints);
}

#[test]
fn the_preloaded_library_names_backends_at_one_point() {
    let backends = ["defuse_compose", "defuse_memory", "defuse_passthrough"];
    let named = |path: &PathBuf| {
        let text = read(path);
        let code = code_only(&text);
        let name = relative(path);
        let inside = name.starts_with("preload/") && !name.ends_with("/src/process/compose.rs");
        (inside && backends.iter().any(|backend| has_word(&code, backend)))
            .then(|| format!("{name} names a backend: that is for compose.rs"))
    };
    complain(sources().iter().filter_map(named).collect());
}

/// The protocol and what serves it are for the crates that speak it. The layer for clients in other
/// processes is for frontends that have such clients.
#[test]
fn the_protocol_is_for_the_crates_that_speak_it() {
    let clients = ["frontends/socket", "frontends/shared"];
    let users: [(&str, &[&str]); 4] = [
        (
            "wire",
            &["backends/remote", "session", "frontends/fuse", "libfuse", clients[0], clients[1]],
        ),
        ("session", &["frontends/fuse", clients[0], clients[1]]),
        ("connection", &[clients[0], clients[1], "testkit"]),
        ("ring", &["backends/remote", "frontends/shared", "testkit"]),
    ];
    let packages = packages();
    let mut complaints = Vec::new();
    for (folder, users) in users {
        let used = packages.iter().find(|package| package.folder == folder).unwrap();
        let uses = |p: &&WorkspaceCrate| p.dependencies.iter().any(|d| d.name == used.name);
        let others = packages.iter().filter(uses).filter(|p| !users.contains(&&*p.folder));
        complaints.extend(others.map(|p| format!("{} must not depend on {folder}", p.name)));
    }
    complain(complaints);
}

#[test]
fn nothing_depends_on_the_program_the_benchmark_or_these_commands() {
    let mut complaints = Vec::new();
    for package in packages() {
        for dependency in &package.dependencies {
            if ["defuse", "defuse-study-program", "defuse-bench", "xtask"]
                .contains(&dependency.name.as_str())
            {
                complaints.push(format!("{} depends on {}", package.name, dependency.name));
            }
        }
    }
    complain(complaints);
}

#[test]
fn only_listed_crates_use_workloads_and_the_study() {
    let packages = packages();
    let mut complaints = Vec::new();
    for (folder, users) in [(WORKLOADS, USES_WORKLOADS), (STUDY, USES_STUDY)] {
        let used = packages.iter().find(|package| package.folder == folder).unwrap();
        let uses = |p: &&WorkspaceCrate| p.dependencies.iter().any(|d| d.name == used.name);
        let strangers = packages.iter().filter(uses).filter(|p| !users.contains(&&*p.folder));
        complaints.extend(strangers.map(|p| format!("{} depends on {}", p.name, used.name)));
    }
    complain(complaints);
}

#[test]
fn the_contract_needs_the_standard_library_and_nothing_else() {
    let packages = packages();
    let fs = packages.iter().find(|package| package.folder == "fs").unwrap();
    assert!(fs.dependencies.is_empty(), "fs has no dependencies, not even for tests");
    let lib = read(&root().join("fs/src/lib.rs"));
    assert!(code_only(&lib).contains("#![forbid(unsafe_code)]"));
}

/// A shortcut that concerned every layer once cost 35 files. The test skips names of one word,
/// which other items have, too.
#[test]
fn a_shortcut_is_named_in_at_most_eight_files() {
    let contract = read(&root().join("fs/src/shortcuts.rs"));
    let (code, mut complaints) = (code_only(&contract), Vec::new());
    let declared = code.lines().filter_map(|line| line.strip_prefix("    fn "));
    let names: Vec<_> = declared
        .filter_map(|rest| rest.split('(').next())
        .filter(|name| name.contains('_'))
        .collect();
    assert!(names.len() >= 3, "{names:?}");
    let is_product = |name: &str| {
        !["/tests/", "/examples/", "testkit/"].iter().any(|part| name.contains(part))
            && !name.ends_with("/tests.rs")
    };
    let texts: Vec<_> = sources()
        .iter()
        .map(|path| (relative(path), code_only(&read(path))))
        .filter(|(name, _)| is_product(name))
        .collect();
    for name in names {
        let files: Vec<_> = texts
            .iter()
            .filter(|(_, code)| has_word(code, name) || has_word(code, &camel_case(name)))
            .map(|(name, _)| name.as_str())
            .collect();
        if !(4..=8).contains(&files.len()) {
            complaints.push(format!("{name} is in {} files: {}", files.len(), files.join(", ")));
        }
    }
    complain(complaints);
}

fn camel_case(name: &str) -> String {
    let parts = name.split('_').filter(|part| !part.is_empty());
    parts.map(|part| part[..1].to_uppercase() + &part[1..]).collect()
}

#[test]
fn unsafe_code_is_in_listed_files_and_has_a_safety_comment() {
    let mut complaints = Vec::new();
    let mut found = BTreeSet::new();
    for path in sources() {
        let (name, text) = (relative(&path), read(&path));
        let lines: Vec<&str> = text.lines().collect();
        for (number, code) in code_only(&text).lines().enumerate() {
            if !has_word(code, "unsafe") {
                continue;
            }
            found.insert(name.clone());
            if !UNSAFE_FILES.contains(&name.as_str()) {
                complaints.push(format!("{name}:{}: unsafe, but not in the list", number + 1));
            }
            if !is_justified(&lines, number) {
                complaints.push(format!("{name}:{}: no SAFETY comment above", number + 1));
            }
        }
    }
    let stale = UNSAFE_FILES.iter().filter(|name| !found.contains(**name));
    complaints.extend(stale.map(|name| format!("{name}: in the list, but nothing is unsafe")));
    complain(complaints);
}

/// True if the statement in line `number` has a comment with `SAFETY` (or, for a declaration, a
/// section `# Safety`) right above.
fn is_justified(lines: &[&str], number: usize) -> bool {
    let above = lines[..number].iter().rev().map(|line| line.trim());
    let mut in_comment = false;
    for line in above.take(20) {
        if line.starts_with("//") {
            in_comment = true;
            if line.contains("SAFETY:") || line.contains("# Safety") {
                return true;
            }
        } else if in_comment || line.is_empty() || line.ends_with([';', '{', '}']) {
            return false;
        }
    }
    false
}

#[test]
fn every_file_is_reachable_as_a_module() {
    let mut complaints = Vec::new();
    for package in packages() {
        let mut reached = BTreeSet::new();
        for target in &package.roots {
            reach(&target.file, true, &mut reached);
        }
        let folder = root().join(&package.folder).join("src");
        for path in sources().into_iter().filter(|path| path.starts_with(&folder)) {
            if !reached.contains(&path) {
                complaints.push(format!("{} is not part of any crate", relative(&path)));
            }
        }
    }
    complain(complaints);
}

/// Adds `file` and the modules that it declares.
fn reach(file: &Path, is_root: bool, reached: &mut BTreeSet<PathBuf>) {
    if !reached.insert(file.to_path_buf()) {
        return;
    }
    let (dir, stem) = (file.parent().unwrap(), file.file_stem().unwrap());
    let dir = if is_root || stem == "mod" { dir.to_path_buf() } else { dir.join(stem) };
    let text = read(file);
    for (line, code) in text.lines().zip(code_only(&text).lines()) {
        let Some(module) = declared_module(code) else { continue };
        let places = [dir.join(format!("{module}.rs")), dir.join(&module).join("mod.rs")];
        match places.iter().find(|place| place.exists()) {
            Some(place) => reach(place, false, reached),
            None => assert!(text.contains("#[path"), "{}: {line}: no file", relative(file)),
        }
    }
}

/// The name in `mod name;`.
fn declared_module(code: &str) -> Option<String> {
    let words: Vec<&str> = code.split_whitespace().collect();
    let place = words.iter().position(|&word| word == "mod")?;
    words.get(place + 1)?.strip_suffix(';').map(str::to_owned)
}

#[test]
fn every_crate_begins_with_its_documentation() {
    let mut complaints = Vec::new();
    for WorkspaceCrate { name, roots, license, .. } in packages() {
        for target in roots.iter().filter(|target| target.kind != "custom-build") {
            if !read(&target.file).starts_with("//!") {
                complaints.push(format!("{}: begins without //!", relative(&target.file)));
            }
        }
        if license.as_deref() != Some("MIT OR Apache-2.0") {
            complaints.push(format!("{name}: its licence is {license:?}"));
        }
    }
    complain(complaints);
}

/// Rows of tables cannot be wrapped.
#[test]
fn a_comment_has_100_columns_at_most() {
    let mut complaints = Vec::new();
    for path in sources() {
        for (number, line) in read(&path).lines().enumerate() {
            let text = line.trim_start();
            let is_table = text.trim_start_matches(['/', '!']).trim_start().starts_with('|');
            if text.starts_with("//") && !is_table && line.chars().count() > 100 {
                complaints.push(format!("{}:{}: wrap it", relative(&path), number + 1));
            }
        }
    }
    complain(complaints);
}

#[test]
fn no_doc_comment_opens_with_a_question_word() {
    let mut complaints = Vec::new();
    for path in sources() {
        let name = relative(&path);
        for (number, word) in opening_words(&read(&path)) {
            if QUESTIONS.contains(&word.as_str()) {
                complaints.push(format!("{name}:{number}: begin with the subject, not \"{word}\""));
            }
        }
    }
    complain(complaints);
}

/// The line number and the first word of every doc comment of a source.
fn opening_words(text: &str) -> Vec<(usize, String)> {
    let doc = |line: &str| {
        let rest = line.strip_prefix("///").or(line.strip_prefix("//!"))?;
        (!rest.starts_with('/')).then(|| rest.to_owned())
    };
    let mut words = Vec::new();
    let mut in_comment = false;
    for (number, line) in text.lines().enumerate() {
        let comment = doc(line.trim_start());
        if let (false, Some(comment)) = (in_comment, &comment) {
            let word = comment.split(|c: char| !c.is_alphanumeric()).find(|word| !word.is_empty());
            words.extend(word.map(|word| (number + 1, word.to_owned())));
        }
        in_comment = comment.is_some();
    }
    words
}

#[test]
fn the_opening_word_of_a_doc_comment_is_found() {
    let text = "//! What it is.\n//! Who\nuse a;\n/// `Whose`\n/// x\nfn b() {}\n// Which\n//// Who\n    /// A.";
    let words: Vec<_> =
        opening_words(text).into_iter().map(|(at, word)| format!("{at} {word}")).collect();
    assert_eq!(words, ["1 What", "4 Whose", "9 A"]);
}

#[test]
fn the_licences_exist() {
    assert!(read(&root().join("LICENSE-MIT")).contains("Permission is hereby granted"));
    let apache = read(&root().join("LICENSE-APACHE"));
    assert!(apache.contains("Version 2.0, January 2004") && apache.contains("END OF TERMS"));
}

#[test]
fn the_architecture_names_every_crate_and_the_path_of_a_read() {
    let text = read(&root().join("ARCHITECTURE.md"));
    let heading =
        text.lines().any(|line| line.starts_with('#') && line.ends_with("Where does a read go"));
    assert!(heading, "ARCHITECTURE.md has no heading \"Where does a read go\"");
    let missing = |package: &WorkspaceCrate| {
        let named = text.contains(&format!("`{}/`", package.folder));
        (!named).then(|| format!("ARCHITECTURE.md does not mention `{}/`", package.folder))
    };
    complain(packages().iter().filter_map(missing).collect());
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut complaints = Vec::new();
    for path in project::files().iter().filter(|path| path.extension().is_some_and(|e| e == "md")) {
        for link in read(path).split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = link.split('#').next().unwrap_or("");
            let local = !target.is_empty() && !target.contains("://") && !target.contains(' ');
            if local && !path.parent().unwrap().join(target).exists() {
                complaints.push(format!("{}: {link} leads nowhere", relative(path)));
            }
        }
    }
    complain(complaints);
}

#[test]
fn rows_of_documents_name_tests_that_exist() {
    let tests: BTreeSet<String> =
        sources().iter().flat_map(|path| functions(&read(path))).collect();
    let mut complaints = Vec::new();
    for document in ["docs/semantics.md", "docs/security.md", "docs/conformance.md"] {
        for name in tests_in_tables(&read(&root().join(document))) {
            // A POSIX case is called GROUP::FUNCTION.
            let function = name.rsplit("::").next().unwrap_or(&name);
            if !tests.contains(function) {
                complaints.push(format!("{document}: there is no test {name}"));
            }
        }
    }
    complain(complaints);
}

/// The names in code in the columns with the title "test".
fn tests_in_tables(text: &str) -> Vec<String> {
    let mut column = None;
    let mut names = Vec::new();
    for line in text.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if !line.starts_with('|') {
            column = None;
        } else if let Some(cell) = column.and_then(|column: usize| cells.get(column)) {
            let words = cell.split('`').skip(1).step_by(2);
            // A step or suite of the test command is one word, and a command has spaces.
            let is_test = |word: &&str| word.contains('_') && !word.contains(' ');
            names.extend(words.filter(is_test).map(str::to_owned));
        } else {
            column = cells.iter().position(|cell| *cell == "test");
        }
    }
    assert!(names.len() > 5, "no table has a column of tests");
    names
}

/// The names of the functions in a source.
fn functions(text: &str) -> Vec<String> {
    let name = |rest: &str| rest.split(['(', '<']).next().unwrap_or("").trim().to_owned();
    text.split("fn ").skip(1).map(name).collect()
}

#[test]
fn nothing_is_left_for_later_and_no_registry_is_named() {
    // In two parts, so that this file does not break its own rule.
    let markers = [["TO", "DO"], ["FIX", "ME"], ["XX", "X"]].map(|parts| parts.concat());
    let hosts = [["crates", ".io/"], ["docs", ".rs/"], ["pypi", ".org"], ["npmjs", ".com"]];
    let hosts = hosts.map(|parts| parts.concat());
    let mut complaints = Vec::new();
    for path in sources().into_iter().chain(manifests()) {
        for (number, line) in read(&path).lines().enumerate() {
            let at = format!("{}:{}", relative(&path), number + 1);
            if let Some(marker) = markers.iter().find(|marker| has_word(line, marker)) {
                complaints.push(format!("{at}: {marker}: do it or leave it"));
            }
            if let Some(host) = hosts.iter().find(|host| line.contains(host.as_str())) {
                complaints.push(format!("{at}: names {host}"));
            }
        }
    }
    complain(complaints);
}

/// `cargo xtask test` counts what tests leave out by these words, and fails a run under CI by them.
#[test]
fn tests_report_left_out_parts_in_the_words_that_are_counted() {
    let mut complaints = Vec::new();
    for path in sources() {
        for (number, line) in read(&path).lines().enumerate() {
            let said = line.split_once("println!(\"").map_or("", |(_, said)| said);
            let counted = said.starts_with("skipped: ") || said.starts_with("not here: ");
            if !counted && (said.starts_with("skipped") || said.starts_with("not here")) {
                complaints.push(format!("{}:{}: {said}", relative(&path), number + 1));
            }
        }
    }
    complain(complaints);
}

fn manifests() -> impl Iterator<Item = PathBuf> {
    project::files().into_iter().filter(|path| path.ends_with("Cargo.toml"))
}
