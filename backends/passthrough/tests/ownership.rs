//! Owner, group, mode and ACLs of new files, compared with the result of the same call by a process
//! of that user on the same directory.

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use common::*;
use defuse_fs::*;
use defuse_passthrough::PassthroughOptions;
use rustix::fs::{CWD, FileType, Mode, OFlags, XattrFlags};

const NATIVE: &str = "DEFUSE_TEST_NATIVE";

/// Not a test of its own: the process of another user, which creates one file natively.
#[test]
fn native_child() {
    let Ok(order) = std::env::var(NATIVE) else { return };
    let words: Vec<&str> = order.split(' ').collect();
    let [kind, perm, umask, path] = words[..] else { panic!("{order}") };
    let octal = |text| u32::from_str_radix(text, 8).unwrap();
    rustix::process::umask(Mode::from_raw_mode(octal(umask)));
    let mode = Mode::from_raw_mode(octal(perm));
    match kind {
        "dir" => rustix::fs::mkdirat(CWD, path, mode).unwrap(),
        "fifo" => rustix::fs::mknodat(CWD, path, FileType::Fifo, mode, 0).unwrap(),
        "file" => {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
            drop(rustix::fs::openat(CWD, path, flags, mode).unwrap());
        }
        "link" => rustix::fs::symlinkat("text", CWD, path).unwrap(),
        _ => panic!("{order}"),
    }
}

struct OwnershipUser {
    uid: u32,
    gid: u32,
    extra: Option<u32>,
}

fn make_natively(user: &OwnershipUser, kind: &str, perm: u32, umask: u32, path: &Path) {
    let groups = match user.extra {
        Some(gid) => format!("--groups={gid}"),
        None => "--clear-groups".into(),
    };
    let status = Command::new("setpriv")
        .args([&format!("--reuid={}", user.uid), &format!("--regid={}", user.gid), &groups])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "native_child"])
        .env(NATIVE, format!("{kind} {perm:o} {umask:o} {}", path.display()))
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
}

fn make_served(
    served: &ServedDirectory,
    dir: Ino,
    user: &OwnershipUser,
    kind: &str,
    perm: u32,
    umask: u32,
) -> Entry {
    let cx = cx(user.uid, user.gid);
    let file_kind = match kind {
        "dir" => FileKind::Directory,
        "fifo" => FileKind::Fifo,
        "link" => FileKind::Symlink,
        _ => FileKind::Regular,
    };
    let node = NewNode {
        umask,
        supplementary_gid: user.extra,
        ..NewNode::new(file_kind, perm, cx.caller)
    };
    match kind {
        "dir" => served.fs.mkdir(&cx, dir, name("served"), &node).unwrap(),
        "fifo" => served.fs.mknod(&cx, dir, name("served"), &node).unwrap(),
        "link" => served.fs.symlink(&cx, dir, name("served"), b"text", &node).unwrap(),
        _ => {
            let args = flags(OpenFlags::WRONLY | OpenFlags::CREAT | OpenFlags::EXCL);
            let made = served.fs.create(&cx, dir, name("served"), &node, args).unwrap();
            let file = File { ino: made.0.ino, fh: made.1.fh };
            served.release(file);
            made.0
        }
    }
}

/// The attributes to compare.
fn facts(path: &Path) -> (u32, u32, u32, Vec<Option<Vec<u8>>>) {
    let meta = fs::symlink_metadata(path).unwrap();
    let acl = |name: &str| {
        let mut value = [0; 256];
        let len = rustix::fs::lgetxattr(path, name, &mut value[..]).ok()?;
        Some(value[..len].to_vec())
    };
    let acls = vec![acl("system.posix_acl_access"), acl("system.posix_acl_default")];
    (meta.mode(), meta.uid(), meta.gid(), acls)
}

/// `user::rwx,user:3000:rwx,group::r-x,mask::rwx,other::---` in the kernel's format.
fn default_acl() -> Vec<u8> {
    const ANY: u32 = u32::MAX;
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, ANY), (2, 7, 3000), (4, 5, ANY), (0x10, 7, ANY), (0x20, 0, ANY)];
    let mut value = 2_u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        value.extend([&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat());
    }
    value
}

#[test]
fn a_new_file_has_the_owner_and_mode_that_native_creation_gives_it() {
    if !is_root() || Command::new("setpriv").arg("--version").output().is_err() {
        return;
    }
    let users = [
        OwnershipUser { uid: 1000, gid: 1000, extra: None },
        OwnershipUser { uid: 0, gid: 0, extra: None },
        OwnershipUser { uid: 1001, gid: 1000, extra: Some(2000) },
        OwnershipUser { uid: 1000, gid: 0, extra: None },
    ];
    let served = |base: &Path| {
        let served = ServedDirectory::new(base, PassthroughOptions::default());
        fs::set_permissions(served.path(""), fs::Permissions::from_mode(0o755)).unwrap();
        served
    };
    for base in bases() {
        let served = served(&base);
        let parents = [("plain", 0o777, false), ("setgid", 0o2777, false), ("acl", 0o777, true)];
        for (parent, mode, acl) in parents {
            served.act_as_myself();
            let path = served.path(parent);
            fs::create_dir(&path).unwrap();
            chown(&path, Some(0), Some(2000)).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            if acl {
                let (name, value) = ("system.posix_acl_default", default_acl());
                if rustix::fs::setxattr(&path, name, &value, XattrFlags::empty()).is_err() {
                    eprintln!("no ACLs on {}", base.display());
                    continue;
                }
                assert!(served.fs.caps().posix_acl);
            }
            let dir = served.lookup(parent).unwrap();
            for user in &users {
                for (kind, perm, umask) in [
                    ("file", 0o666, 0o022),
                    ("file", 0o2775, 0o027),
                    ("dir", 0o777, 0o077),
                    ("fifo", 0o644, 0),
                    ("link", 0o777, 0o022),
                ] {
                    let native = path.join("native");
                    make_natively(user, kind, perm, umask, &native);
                    let entry = make_served(&served, dir.ino, user, kind, perm, umask);
                    let ours = path.join("served");
                    let what = format!("{kind} {perm:o} in {parent} by {}", user.uid);
                    assert_eq!(facts(&ours), facts(&native), "{what}");
                    assert_eq!((entry.attr.mode(), entry.attr.uid), {
                        let (mode, uid, ..) = facts(&native);
                        (mode, uid)
                    });
                    served.fs.forget(entry.ino, 1);
                    for path in [ours, native] {
                        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
                    }
                }
            }
        }
    }
}

#[test]
fn restored_threads_have_their_previous_credentials() {
    if !is_root() {
        return;
    }
    let options = PassthroughOptions {
        credentials: defuse_passthrough::CredentialsPolicy::Restore,
        ..PassthroughOptions::default()
    };
    let served = ServedDirectory::new(&bases()[0], options);
    fs::set_permissions(served.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let status = || {
        let text = fs::read_to_string("/proc/thread-self/status").unwrap();
        let keep = |line: &&str| {
            ["Uid:", "Gid:", "Groups:", "CapEff:", "Umask:"].iter().any(|w| line.starts_with(w))
        };
        text.lines().filter(keep).map(str::to_owned).collect::<Vec<_>>()
    };
    let before = status();
    let user = OwnershipUser { uid: 1000, gid: 1001, extra: None };
    for (kind, perm) in [("file", 0o640), ("dir", 0o700)] {
        let entry = make_served(&served, Ino::ROOT, &user, kind, perm, 0o022);
        assert_eq!((entry.attr.uid, entry.attr.gid, entry.attr.perm), (1000, 1001, perm));
        let path = served.path("served");
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
    }
    let (entry, file) = served.create("suid");
    let set = SetAttr { perm: Some(0o6755), ..SetAttr::default() };
    served.fs.setattr(&own_context(), entry.ino, None, &set).unwrap();
    let args = WriteArgs { kill_suidgid: true, ..WriteArgs::default() };
    served.write(file, args, b"x").unwrap();
    assert_eq!(served.fs.getattr(&own_context(), entry.ino, None).unwrap().perm, 0o755);
    assert_eq!(status(), before);
}

/// `security.capability` with cap_net_raw, as setcap(8) writes it.
fn capability() -> Vec<u8> {
    [0x0200_0001_u32, 1 << 13, 0, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn set_id_bits_are_cleared_exactly_when_requested() {
    if !is_root() {
        return;
    }
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, file) = served.create("a");
        let has_caps = |ino| served.xattr(ino, "security.capability").is_ok();
        let arm = || {
            let set = SetAttr { perm: Some(0o6775), ..SetAttr::default() };
            served.fs.setattr(&own_context(), entry.ino, None, &set).unwrap();
            served.set_xattr(entry.ino, "security.capability", &capability()).is_ok()
        };
        let perm = || served.fs.getattr(&own_context(), entry.ino, None).unwrap().perm;
        let write = |kill_suidgid| {
            let args = WriteArgs { kill_suidgid, ..WriteArgs::default() };
            served.write(file, args, b"x").unwrap();
        };
        let truncate = |kill_suidgid| {
            let set = SetAttr { size: Some(0), kill_suidgid, ..SetAttr::default() };
            served.fs.setattr(&own_context(), entry.ino, None, &set).unwrap();
        };
        let open = |kill_suidgid| {
            let flags = OpenFlags(OpenFlags::WRONLY | OpenFlags::TRUNC);
            let args = OpenArgs { flags, kill_suidgid };
            served.fs.open(&own_context(), entry.ino, args).unwrap();
        };
        let ways: [&dyn Fn(bool); 3] = [&write, &truncate, &open];
        for way in ways {
            arm();
            way(false);
            assert_eq!(perm(), 0o6775);
            let caps = arm();
            way(true);
            assert_eq!(perm(), 0o775);
            assert!(!caps || !has_caps(entry.ino));
        }
        let caps = arm();
        let owner = SetAttr { uid: Some(1000), ..SetAttr::default() };
        let attr = served.fs.setattr(&own_context(), entry.ino, None, &owner).unwrap();
        assert_eq!((attr.perm, attr.uid), (0o775, 1000));
        assert!(!caps || !has_caps(entry.ino));
        arm();
        let range = Fallocate { mode: 0, offset: 0, length: 4096 };
        served.fs.fallocate(&cx(1000, 1000), file, range).unwrap();
        assert_eq!(perm(), 0o775);
    });
}

#[test]
fn a_new_file_has_its_security_label_from_the_start() {
    if !is_root() {
        return;
    }
    run_everywhere(&PassthroughOptions::default(), |served| {
        let cx = cx(1000, 1000);
        fs::set_permissions(served.path(""), fs::Permissions::from_mode(0o777)).unwrap();
        let label = XattrName::new(b"security.defuse").unwrap();
        let node = NewNode { security: Some((label, b"L")), ..regular(&cx, 0o600) };
        let (entry, _) =
            served.fs.create(&cx, Ino::ROOT, name("a"), &node, flags(OpenFlags::RDWR)).unwrap();
        assert_eq!(served.xattr(entry.ino, "security.defuse"), Ok(b"L".to_vec()));
        let node = NewNode { kind: FileKind::Directory, ..node };
        let entry = served.fs.mkdir(&cx, Ino::ROOT, name("d"), &node).unwrap();
        assert_eq!(served.xattr(entry.ino, "security.defuse"), Ok(b"L".to_vec()));
    });
}

/// The credentials of the calling thread according to the kernel: file-system user and group, and
/// effective capabilities apart from `CAP_FSETID`, which every operation sets if it matters.
fn identity() -> (u32, u32, u64) {
    const FSETID: u64 = 1 << 4;
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    let last = |name| line(name).split_whitespace().last().unwrap().parse().unwrap();
    let caps = u64::from_str_radix(line("CapEff:").trim(), 16).unwrap();
    (last("Uid:"), last("Gid:"), caps & !FSETID)
}

const FOWNER: u64 = 1 << 3;
const SYS_RESOURCE: u64 = 1 << 24;

type OwnershipOperation = (&'static str, fn(&ServedDirectory, &Context<'_>, Entry, File));

/// One operation of every kind: on names, attributes, data, and those that create files.
const OPERATIONS: &[OwnershipOperation] = &[
    ("create", |served, cx, _, _| {
        let args = flags(OpenFlags::RDWR | OpenFlags::CREAT | OpenFlags::EXCL);
        let (made, opened) =
            served.fs.create(cx, Ino::ROOT, name("c"), &regular(cx, 0o600), args).unwrap();
        served.release(File { ino: made.ino, fh: opened.fh });
        fs::remove_file(served.path("c")).unwrap();
    }),
    ("mkdir", |served, cx, _, _| {
        let node = NewNode::new(FileKind::Directory, 0o700, cx.caller);
        served.fs.mkdir(cx, Ino::ROOT, name("d"), &node).unwrap();
        fs::remove_dir(served.path("d")).unwrap();
    }),
    ("lookup", |served, cx, entry, _| {
        assert_eq!(served.fs.lookup(cx, Ino::ROOT, name("file")).unwrap().ino, entry.ino);
    }),
    ("getattr", |served, cx, entry, _| {
        served.fs.getattr(cx, entry.ino, None).unwrap();
    }),
    ("setattr", |served, cx, entry, _| {
        let set = SetAttr { perm: Some(0o666), ..SetAttr::default() };
        served.fs.setattr(cx, entry.ino, None, &set).unwrap();
    }),
    ("open", |served, cx, entry, _| {
        let opened = served.fs.open(cx, entry.ino, flags(OpenFlags::RDWR)).unwrap();
        served.release(File { ino: entry.ino, fh: opened.fh });
    }),
    ("write", |served, cx, _, file| {
        let mut source = SliceSource::new(b"x");
        let args = WriteArgs { kill_suidgid: true, ..WriteArgs::default() };
        served.fs.write(cx, file, args, &mut WriteBuf::new(&mut source)).unwrap();
    }),
    ("rename", |served, cx, _, _| {
        let (from, to) = ((Ino::ROOT, name("file")), (Ino::ROOT, name("file2")));
        served.fs.rename(cx, from, to, RenameFlags(0)).unwrap();
        served.fs.rename(cx, to, from, RenameFlags(0)).unwrap();
    }),
];

/// A thread kept the user for whom it last created a file, even for reads of another user, and had
/// the capabilities of the daemon for every caller.
#[test]
fn the_credentials_of_an_operation_do_not_depend_on_earlier_ones_of_its_thread() {
    if !is_root() {
        return;
    }
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, file) = served.create("file");
        fs::set_permissions(served.path("file"), fs::Permissions::from_mode(0o666)).unwrap();
        let callers = [cx(0, 0), cx(1000, 1000), cx(1001, 1001)];
        let run = |(_, operation): &OwnershipOperation, cx| {
            operation(served, cx, entry, file);
            identity()
        };
        for subject in OPERATIONS {
            for cx in &callers {
                let expected = run(subject, cx);
                assert_eq!((expected.0, expected.1), (cx.caller.uid, cx.caller.gid));
                // The frontend has permitted this change of attributes, which only the owner may
                // make, so it is made with CAP_FOWNER.
                let denied =
                    if subject.0 == "setattr" { SYS_RESOURCE } else { SYS_RESOURCE | FOWNER };
                assert!(cx.caller.uid == 0 || expected.2 & denied == 0, "{}", subject.0);
                for (before, other) in OPERATIONS.iter().zip(callers.iter().cycle()) {
                    run(before, other);
                    let seen = run(subject, cx);
                    let story = (subject.0, cx.caller.uid, before.0, other.caller.uid);
                    assert_eq!(seen, expected, "{story:?}");
                }
            }
        }
    });
}

/// A thread started by a thread that acted for a user inherited that user's capabilities, and took
/// them for the daemon's: root could not set set-user-id on a user's file.
#[test]
fn a_thread_is_not_limited_by_the_credentials_of_its_creator() {
    if !is_root() {
        return;
    }
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, _) = served.create("file");
        std::os::unix::fs::chown(served.path("file"), Some(1000), Some(1000)).unwrap();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                served.fs.lookup(&cx(1001, 1001), Ino::ROOT, name("file")).unwrap();
                let second = scope.spawn(|| {
                    let set = SetAttr { perm: Some(0o6755), ..SetAttr::default() };
                    served.fs.setattr(&cx(0, 0), entry.ino, None, &set).map(|attr| attr.perm)
                });
                second.join().unwrap()
            });
            assert_eq!(first.join().unwrap(), Ok(0o6755));
        });
    });
}

/// Capabilities over the files of user 1000 alone, as root of a namespace with this user has them.
struct NamespaceRoot;

impl SupplementaryGroups for NamespaceRoot {
    fn groups_of(&self, _: Caller) -> Result<Vec<u32>> {
        Ok(Vec::new())
    }

    fn has_capability(&self, _: Caller, _: OwnerCapability, owner: (u32, u32)) -> bool {
        owner.0 == 1000
    }
}

/// The kernel checks fchmod(2) and the like with the owner that it has cached, however old that is.
/// The daemon then repeated with CAP_FOWNER what the lower file system had refused to the former
/// owner, and changed the group with CAP_CHOWN.
#[test]
fn a_former_owner_changes_no_attributes() {
    if !is_root() {
        return;
    }
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, file) = served.create("file");
        let path = served.path("file");
        let none = SetAttr::default();
        let at = Some(SetTime::At(Timestamp { secs: 7, nanos: 0 }));
        let for_owners = [
            SetAttr { perm: Some(0o777), ..none },
            SetAttr { perm: Some(0o4777), ..none },
            SetAttr { gid: Some(1001), ..none },
            SetAttr { uid: Some(1001), ..none },
            SetAttr { mtime: at, ..none },
            SetAttr { atime: at, mtime: at, ..none },
        ];
        let give = |uid, mode| {
            served.act_as_myself();
            chown(&path, Some(uid), Some(uid)).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        };
        let list =
            [&2_u32.to_le_bytes()[..], &acl_entry(1, 6), &acl_entry(4, 6), &acl_entry(0x20, 6)]
                .concat();
        let access = XattrName::new(b"system.posix_acl_access").unwrap();
        let former = cx(1001, 1001);
        for mode in [0o755, 0o4755] {
            give(0, mode);
            let before = fs::metadata(&path).unwrap();
            for set in &for_owners {
                assert_eq!(
                    served.fs.setattr(&former, entry.ino, None, set),
                    Err(Errno::EPERM),
                    "{set:?}"
                );
            }
            let set =
                served.fs.setxattr(&former, entry.ino, access, &list, SetXattrFlags::default());
            assert!(matches!(set, Err(Errno::EPERM | Errno::EOPNOTSUPP)), "{set:?}");
            let after = fs::metadata(&path).unwrap();
            let facts = |meta: &fs::Metadata| (meta.mode(), meta.uid(), meta.gid(), meta.mtime());
            assert_eq!(facts(&after), facts(&before));
        }
        // By ftruncate(2), and of the cache of writes.
        let truncate = SetAttr { size: Some(1), mtime: Some(SetTime::Now), ..none };
        served.fs.setattr(&former, entry.ino, Some(file.fh), &truncate).unwrap();
        let flush = SetAttr { mtime: at, ..none };
        served.fs.setattr(&former, entry.ino, Some(file.fh), &flush).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mtime(), 7);
        // The owner, and root of a namespace that has the owner.
        let root_of_namespace = cx(1001, 1001).with_groups(&NamespaceRoot);
        for set in &for_owners[..1] {
            give(1001, 0o755);
            served.fs.setattr(&former, entry.ino, None, set).unwrap();
            give(1000, 0o755);
            served.fs.setattr(&root_of_namespace, entry.ino, None, set).unwrap();
            give(0, 0o755);
            let refused = served.fs.setattr(&root_of_namespace, entry.ino, None, set);
            assert_eq!(refused, Err(Errno::EPERM));
        }
        give(1000, 0o755);
        let group = SetAttr { gid: Some(1001), ..none };
        served.fs.setattr(&root_of_namespace, entry.ino, None, &group).unwrap();
        give(0, 0o755);
        served.release(file);
    });
}

fn acl_entry(tag: u16, perm: u16) -> Vec<u8> {
    [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &u32::MAX.to_le_bytes()].concat()
}
