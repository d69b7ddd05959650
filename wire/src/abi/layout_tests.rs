//! The size and the offsets of every structure, compared with fixed numbers, and with the installed
//! header by the C compiler.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::{Command, Stdio};

use super::{NotifyCode, Opcode, flags::CONSTANTS, structs::LAYOUTS};

const HEADER: &str = "/usr/include/linux/fuse.h";

fn list_ours() -> BTreeMap<String, u64> {
    let mut facts = BTreeMap::new();
    for layout in LAYOUTS {
        facts.insert(format!("sizeof {}", layout.name), layout.size as u64);
        for (field, offset) in layout.fields {
            let field = field.strip_suffix('_').unwrap_or(field);
            facts.insert(format!("offsetof {} {field}", layout.name), *offset as u64);
        }
    }
    facts.extend(CONSTANTS.iter().map(|(name, value)| (format!("const {name}"), *value)));
    let prefixed = |name: &str| match name {
        "CUSE_INIT" => format!("const {name}"),
        _ => format!("const FUSE_{name}"),
    };
    facts.extend(Opcode::ALL.iter().map(|&o| (prefixed(o.name()), o as u64)));
    let notify = |code: &NotifyCode| format!("const FUSE_NOTIFY_{}", code.name());
    facts.extend(NotifyCode::ALL.iter().map(|code| (notify(code), *code as u64)));
    for (name, value) in [
        ("FUSE_KERNEL_VERSION", u64::from(super::FUSE_KERNEL_VERSION)),
        ("FUSE_ROOT_ID", super::FUSE_ROOT_ID),
        ("FUSE_MIN_READ_BUFFER", super::FUSE_MIN_READ_BUFFER as u64),
        ("FUSE_COMPAT_SETXATTR_IN_SIZE", super::FUSE_COMPAT_SETXATTR_IN_SIZE as u64),
        ("CUSE_INIT_INFO_MAX", super::CUSE_INIT_INFO_MAX as u64),
        ("FUSE_IOCTL_MAX_IOV", super::FUSE_IOCTL_MAX_IOV as u64),
        ("FUSE_INVALID_UIDGID", u64::from(super::FUSE_INVALID_UIDGID)),
        ("FUSE_UNIQUE_RESEND", super::FUSE_UNIQUE_RESEND),
        ("FUSE_MAX_NR_SECCTX", u64::from(super::FUSE_MAX_NR_SECCTX)),
        ("FUSE_EXT_GROUPS", u64::from(super::FUSE_EXT_GROUPS)),
        ("FUSE_URING_IN_OUT_HEADER_SZ", super::FUSE_URING_IN_OUT_HEADER_SZ as u64),
        ("FUSE_URING_OP_IN_OUT_SZ", super::FUSE_URING_OP_IN_OUT_SZ as u64),
        ("FUSE_IO_URING_CMD_REGISTER", u64::from(super::FUSE_IO_URING_CMD_REGISTER)),
        (
            "FUSE_IO_URING_CMD_COMMIT_AND_FETCH",
            u64::from(super::FUSE_IO_URING_CMD_COMMIT_AND_FETCH),
        ),
        ("FUSE_DEV_IOC_CLONE", u64::from(super::FUSE_DEV_IOC_CLONE)),
        ("FUSE_DEV_IOC_BACKING_OPEN", u64::from(super::FUSE_DEV_IOC_BACKING_OPEN)),
        ("FUSE_DEV_IOC_BACKING_CLOSE", u64::from(super::FUSE_DEV_IOC_BACKING_CLOSE)),
        ("FUSE_DEV_IOC_SYNC_INIT", u64::from(super::FUSE_DEV_IOC_SYNC_INIT)),
    ] {
        facts.insert(format!("const {name}"), value);
    }
    facts
}

/// Offsets and sizes are fixed in a file so that a mistake in a definition is found on machines
/// whose header is older than the structure.
#[test]
fn every_structure_has_its_fixed_layout() {
    let mut actual = String::new();
    for layout in LAYOUTS {
        write!(actual, "{} {}", layout.name, layout.size).unwrap();
        for (field, offset) in layout.fields {
            write!(actual, " {field}:{offset}").unwrap();
        }
        actual.push('\n');
    }
    for (line, expected) in actual.lines().zip(include_str!("layout.txt").lines()) {
        assert_eq!(line, expected);
    }
    assert_eq!(actual.lines().count(), include_str!("layout.txt").lines().count());
}

#[test]
fn the_installed_header_agrees() {
    let path = std::env::var("FUSE_HEADER").unwrap_or(HEADER.to_owned());
    let Ok(header) = std::fs::read_to_string(&path) else {
        eprintln!("skipped: no {path} to compare with");
        return;
    };
    let facts = list_ours();
    let known: Vec<_> = facts.keys().filter(|fact| header_knows(&header, fact)).collect();
    let Some(output) = run_c(&c_program(&path, &known)) else {
        eprintln!("skipped: no C compiler (cc) to compare with {path}");
        return;
    };
    let mut compared = 0;
    for line in output.lines() {
        let (fact, value) = line.rsplit_once(' ').unwrap();
        assert_eq!(facts[fact], value.parse::<u64>().unwrap(), "{fact}");
        compared += 1;
    }
    eprintln!("{compared} of {} facts compared with {path}", facts.len());
    assert_eq!(compared, known.len());
    assert!(compared > 300, "only {compared} facts were found in {path}");
}

/// True if the header defines the structure, field or constant of a fact.
fn header_knows(header: &str, fact: &str) -> bool {
    let words: Vec<_> = fact.split(' ').collect();
    let body = |name: &str| {
        let (_, rest) = header.split_once(&format!("struct {name} {{"))?;
        rest.split_once("\n};").map(|(body, _)| body)
    };
    match words[..] {
        ["sizeof", name] => body(name).is_some(),
        // Later minor versions use parts of these for new fields.
        ["offsetof", _, "unused" | "padding" | "spare"] => false,
        ["offsetof", name, field] => body(name).is_some_and(|body| has_word(body, field)),
        ["const", name] => header.lines().any(|line| {
            let defines = line.starts_with("#define") || line.contains('=');
            defines && has_word(line, name)
        }),
        _ => unreachable!("{fact}"),
    }
}

fn has_word(text: &str, word: &str) -> bool {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|other| other == word)
}

fn c_program(header: &str, facts: &[&String]) -> String {
    let mut c = String::new();
    for include in ["<stddef.h>", "<stdint.h>", "<stdio.h>", "<sys/ioctl.h>"] {
        writeln!(c, "#include {include}").unwrap();
    }
    writeln!(c, "#include \"{header}\"\nint main(void) {{").unwrap();
    for fact in facts {
        let words: Vec<_> = fact.split(' ').collect();
        let value = match words[..] {
            ["sizeof", name] => format!("sizeof(struct {name})"),
            ["offsetof", name, field] => format!("offsetof(struct {name}, {field})"),
            // Through uint32_t if the C constant is a negative int.
            ["const", name] => format!("({name} < 0 ? (uint32_t)({name}) : {name})"),
            _ => unreachable!("{fact}"),
        };
        writeln!(c, "printf(\"{fact} %llu\\n\", (unsigned long long)({value}));").unwrap();
    }
    c.push_str("return 0; }\n");
    c
}

/// Compiles and runs a program; `None` without a compiler.
fn run_c(source: &str) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    let (file, program) = (dir.path().join("abi.c"), dir.path().join("abi"));
    std::fs::write(&file, source).unwrap();
    let status = Command::new("cc")
        .arg("-w")
        .arg("-o")
        .args([&program, &file])
        .stdin(Stdio::null())
        .status()
        .ok()?;
    assert!(status.success(), "the comparison program does not compile");
    let output = Command::new(&program).output().unwrap();
    assert!(output.status.success());
    Some(String::from_utf8(output.stdout).unwrap())
}
