//! The options of a mount (`-o`): one table for parsing, help, the manual and suggestions.

mod table;

pub use defuse_compose::split;
pub use table::{OPTIONS, OptionScope};

use std::fmt::Write as _;

use defuse_compose::ParsedSource;
use defuse_fs::source::{FrontendProperties, GrantedEffects, SourceKind};
use defuse_fuse::abi::InitIn;
use defuse_fuse::mount::MountOptions;
use defuse_fuse::{IoUring, SessionOptions, ThreadPolicy, negotiate};

use crate::error::{CommandFailure, Result};
use crate::sandbox::SandboxExtent;
use crate::sources::SOURCES;

/// All settings that options change.
#[derive(Clone, Debug)]
pub struct OptionSettings {
    /// The settings of the mount.
    pub mount: MountOptions,
    /// The settings of the session.
    pub session: SessionOptions,
    /// The settings of the source.
    pub source: defuse_compose::SourceSettings,
    /// The extent to which the daemon gives up what it does not need.
    pub sandbox: SandboxExtent,
    /// The kernel checks permissions; `None` without such an option.
    pub default_permissions: Option<bool>,
}

/// A named set of options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OptionProfile {
    /// The fastest options that are correct for every file system.
    #[default]
    Default,
    /// StackfsBase of "To FUSE or Not to FUSE": one thread, WRITE of 4 KiB, no splice.
    Base,
    /// StackfsOpt of the same: threads, write-back, WRITE of 128 KiB, splice.
    Opt,
}

impl OptionProfile {
    fn settings(self) -> OptionSettings {
        let stackfs = || FrontendProperties {
            stackfs: true,
            backing_files: false,
            ..FrontendProperties::default()
        };
        let (session, frontend) = match self {
            OptionProfile::Default => (SessionOptions::default(), FrontendProperties::default()),
            OptionProfile::Base => (SessionOptions::stackfs_base(), stackfs()),
            OptionProfile::Opt => (SessionOptions::stackfs_opt(), stackfs()),
        };
        let source = defuse_compose::SourceSettings::for_frontend(frontend);
        let mount = MountOptions::default();
        OptionSettings {
            mount,
            session,
            source,
            default_permissions: None,
            sandbox: SandboxExtent::Usual,
        }
    }
}

/// Applies `lists` (each a value of `-o`) for `source`, over `profile`.
pub fn parse(
    profile: OptionProfile,
    source: &ParsedSource,
    lists: &[String],
) -> Result<OptionSettings> {
    let mut settings = profile.settings();
    settings.mount.fsname = fsname(source);
    for option in lists.iter().flat_map(|list| split(list)) {
        apply(&mut settings, source.kind, &option)?;
    }
    let session = &settings.session;
    if session.policy != ThreadPolicy::Adaptive && session.io_uring == IoUring::Required {
        let policy = session.policy.name();
        return Err(CommandFailure::Usage(format!(
            "options io_uring and workers={policy} exclude each other, because threads read /dev/fuse by \
             this policy: remove one of them"
        )));
    }
    let checked = settings.default_permissions.unwrap_or_else(|| must_check(&settings.mount));
    let single_user = !(settings.mount.allow_other && checked);
    consult_access_lists(&mut settings.session, profile, single_user)?;
    settings.session.default_permissions = checked;
    settings.mount.default_permissions = checked;
    settings.source.read_only = settings.mount.ro;
    let frontend = &mut settings.source.frontend;
    frontend.single_user = single_user;
    frontend.writeback = settings.session.writeback;
    frontend.access_times = settings.mount.access_times;
    frontend.granted = GrantedEffects { suid: !settings.mount.nosuid, dev: !settings.mount.nodev };
    Ok(settings)
}

/// Makes the kernel consult access lists where several users have access: by mode bits alone it
/// would admit users whom a list denies, and a daemon of root opens files for them.
fn consult_access_lists(
    session: &mut SessionOptions,
    profile: OptionProfile,
    single_user: bool,
) -> Result {
    let refused = session.disabled & defuse_fuse::abi::FUSE_POSIX_ACL != 0;
    if single_user || !refused {
        return Ok(());
    }
    if profile == OptionProfile::Default {
        return Err(CommandFailure::Usage(
            "options no_posix_acl and allow_other exclude each other, because users would be admitted whom \
             an access list denies: remove one of them"
                .to_owned(),
        ));
    }
    session.disabled &= !defuse_fuse::abi::FUSE_POSIX_ACL;
    Ok(())
}

/// The default of `default_permissions`. Without `allow_other`, only processes of the mounting user
/// have access, and root may do everything, so its own mount needs no checks. They would cost a
/// GETATTR of the directory after every change in it, because a change invalidates the cached
/// attributes.
fn must_check(mount: &MountOptions) -> bool {
    mount.allow_other || !rustix::process::geteuid().is_root()
}

/// The source for `/proc/mounts`. The kernel accepts up to 255 bytes.
fn fsname(source: &ParsedSource) -> String {
    let text = source.text().to_string_lossy().into_owned();
    if text.len() < 256 { text } else { source.kind.facts().name.to_owned() }
}

fn apply(settings: &mut OptionSettings, kind: &dyn SourceKind, option: &str) -> Result {
    let (name, value) = match option.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (option, None),
    };
    if let Some(option) = OPTIONS.iter().find(|option| option.name == name) {
        return option.apply(settings, value);
    }
    if has_option(kind, name) {
        let option = option.to_owned();
        kind.check(std::slice::from_ref(&option))?;
        settings.source.options.push(option);
        return Ok(());
    }
    if let Some(owner) = SOURCES.kinds().find(|kind| has_option(*kind, name)) {
        let (owner, kind) = (owner.facts().name, kind.facts().name);
        return Err(CommandFailure::Usage(format!(
            "option {name} is for sources of type {owner}, not {kind}: remove it"
        )));
    }
    let Some((_, bit)) = capability_options().into_iter().find(|(option, _)| option == name) else {
        return Err(unknown_option_error(name));
    };
    if value.is_some() {
        return Err(CommandFailure::Usage(format!(
            "option {name} takes no value: write just {name}"
        )));
    }
    settings.session.disabled |= bit;
    Ok(())
}

fn has_option(kind: &dyn SourceKind, name: &str) -> bool {
    kind.options().iter().any(|option| option.name == name)
}

/// The option `no_…` of every INIT capability, with its bit.
pub fn capability_options() -> Vec<(String, u64)> {
    let kernel =
        InitIn { major: 7, minor: 45, flags: u32::MAX, flags2: u32::MAX, ..InitIn::default() };
    let negotiated = negotiate(&kernel, &defuse_fs::Caps::default(), &SessionOptions::default());
    let decisions = negotiated.map(|(_, negotiated)| negotiated.decisions).unwrap_or_default();
    let option = |name: &str| format!("no_{}", name.to_ascii_lowercase());
    decisions.iter().map(|decision| (option(decision.name), decision.bit)).collect()
}

fn unknown_option_error(name: &str) -> CommandFailure {
    let capabilities = capability_options();
    let capabilities = capabilities.iter().map(|(name, _)| name.as_str());
    let of_kinds = SOURCES.kinds().flat_map(|kind| kind.options()).map(|option| option.name);
    let own = OPTIONS.iter().map(|option| option.name);
    let candidates = own.chain(of_kinds).chain(capabilities);
    let near = candidates.map(|known| (strsim::normalized_damerau_levenshtein(known, name), known));
    let nearest = near.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > 0.6);
    let hint = match nearest {
        Some((_, known)) => format!("did you mean {known}?"),
        None => "see `defuse help options`".to_owned(),
    };
    CommandFailure::Usage(format!("there is no option {name}: {hint}"))
}

/// True for an option of any source.
pub fn is_known(name: &str) -> bool {
    OPTIONS.iter().any(|option| option.name == name)
        || SOURCES.kinds().any(|kind| has_option(kind, name))
        || capability_options().iter().any(|(option, _)| option == name)
}

/// Escapes an option, so that [`split`] returns it whole.
pub fn escape(option: &str) -> String {
    option.replace('\\', "\\\\").replace(',', "\\,")
}

/// A part of the table: its title, and the form and help of each option.
pub type OptionPart = (String, Vec<(String, &'static str)>);

/// The parts of the table, with their titles.
pub fn parts() -> Vec<OptionPart> {
    let part = |title: String, scope: OptionScope| {
        let options = OPTIONS.iter().filter(|option| option.scope == scope);
        (title, options.map(|option| (option.form(), option.help)).collect())
    };
    let mut parts = vec![
        part("of every mount".into(), OptionScope::Mount),
        part("of every session".into(), OptionScope::Session),
    ];
    for kind in SOURCES.kinds() {
        let lines = kind.options().into_iter().map(|option| (option.form, option.help)).collect();
        parts.push((format!("of {}", kind.facts().form), lines));
    }
    parts
}

/// The table as text.
pub fn help() -> String {
    let mut text = String::new();
    for (title, options) in parts() {
        let _ = writeln!(text, "\nOptions {title}:");
        for (form, help) in options {
            let _ = writeln!(text, "  {form:<32} {help}");
        }
    }
    let _ = writeln!(text, "\nOptions that disable a capability of INIT:");
    let names: Vec<_> = capability_options().into_iter().map(|(name, _)| name).collect();
    for line in names.chunks(3) {
        let _ = writeln!(text, "  {}", line.join(", "));
    }
    text.trim_start().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_fs::posix::AccessTimeRule;
    use defuse_fs::source::LockPlace;
    use defuse_fuse::mount::mount_option_names;
    use std::time::Duration;

    fn parse_list(profile: OptionProfile, kind: &str, list: &str) -> Result<OptionSettings> {
        let rest = if kind == "memory" { "" } else { "x" };
        let source = SOURCES.parse(format!("{kind}:{rest}").as_ref()).unwrap();
        parse(profile, &source, &[list.to_owned()])
    }

    fn expect_parsed(backend: &str, list: &str) -> OptionSettings {
        parse_list(OptionProfile::Default, backend, list).unwrap()
    }

    fn error(backend: &str, list: &str) -> String {
        let failure = parse_list(OptionProfile::Default, backend, list).unwrap_err();
        assert_eq!(failure.code(), 2);
        failure.to_string()
    }

    #[test]
    fn every_mount_option_is_in_the_table_once() {
        for name in mount_option_names() {
            assert!(OPTIONS.iter().any(|option| option.name == name), "{name}");
        }
        for kind in SOURCES.kinds() {
            let of_kind = kind.options().into_iter().map(|option| option.name);
            let own = OPTIONS.iter().map(|option| option.name);
            let mut names: Vec<_> = own.chain(of_kind).collect();
            names.sort_unstable();
            let before = names.len();
            names.dedup();
            assert_eq!(names.len(), before, "{}", kind.facts().name);
        }
        for option in OPTIONS {
            assert!(!option.help.is_empty() && option.help.len() < 100, "{}", option.name);
        }
    }

    #[test]
    fn values_reach_their_settings() {
        let set = expect_parsed(
            "passthrough",
            "ro,max_write=64K,workers=3,attr_timeout=0.5,handles=off,fd_cache=9",
        );
        assert!(set.mount.ro);
        assert_eq!((set.session.max_write, set.session.workers), (65536, Some(3)));
        assert_eq!(set.session.attr_timeout, Some(Duration::from_millis(500)));
        assert_eq!(set.session.entry_timeout, None);
        assert!(set.source.read_only);
        assert_eq!(set.source.options, ["handles=off", "fd_cache=9"]);
        let set = expect_parsed("memory", "size=1G,noatime,uid=5,timeout=2");
        assert_eq!(set.source.options, ["size=1G", "uid=5"]);
        assert_eq!(set.source.frontend.access_times, AccessTimeRule::Never);
        assert_eq!(set.session.negative_timeout, Some(Duration::from_secs(2)));
    }

    #[test]
    fn workers_are_a_number_or_a_policy_with_one() {
        for (list, policy, workers) in [
            ("workers=7", ThreadPolicy::Adaptive, Some(7)),
            ("workers=paper", ThreadPolicy::Paper, None),
            ("workers=paper:1", ThreadPolicy::Paper, Some(1)),
            ("workers=merged:1024", ThreadPolicy::Merged, Some(1024)),
            ("workers=3,workers=merged", ThreadPolicy::Merged, None),
            ("workers=merged,workers=3", ThreadPolicy::Adaptive, Some(3)),
        ] {
            let session = expect_parsed("passthrough", list).session;
            assert_eq!((session.policy, session.workers), (policy, workers), "{list}");
        }
    }

    #[test]
    fn an_option_for_several_parts_reaches_all_of_them() {
        let set = expect_parsed("passthrough", "writeback,locks=filesystem");
        assert!(set.session.writeback && set.source.frontend.writeback);
        assert!(set.session.forward_locks && set.source.frontend.locks == LockPlace::FileSystem);
        for (options, checked) in [
            ("allow_other", true),
            ("default_permissions", true),
            ("allow_other,no_default_permissions", false),
            ("ro", !rustix::process::geteuid().is_root()),
        ] {
            let set = expect_parsed("passthrough", options);
            assert_eq!(set.session.default_permissions, checked, "{options}");
            assert_eq!(set.mount.default_permissions, checked, "{options}");
        }
    }

    #[test]
    fn options_override_their_profile() {
        let with = |profile, list| parse_list(profile, "passthrough", list).unwrap();
        let opt = with(OptionProfile::Opt, "");
        let frontend = &opt.source.frontend;
        assert!(opt.session.writeback && frontend.writeback && frontend.stackfs);
        assert!(!frontend.backing_files);
        let opt = with(OptionProfile::Opt, "no_writeback,xattr,max_write=1M,passthrough");
        assert!(!opt.source.frontend.writeback && opt.source.frontend.backing_files);
        assert_eq!(opt.source.options, ["xattr"]);
        assert_eq!(opt.session.max_write, 1 << 20);
        assert_eq!(with(OptionProfile::Base, "").session.workers, Some(1));
    }

    #[test]
    fn errors_about_options_say_what_is_right() {
        for (backend, list, says) in [
            ("memory", "sise=1", "did you mean size?"),
            ("memory", "qqqq", "see `defuse help options`"),
            ("memory", "size", "needs a value: write size=BYTES"),
            ("memory", "size=1X", "write bytes"),
            ("memory", "mode=99", "an octal number up to 7777"),
            ("memory", "writeback=1", "write just writeback"),
            ("memory", "exclusive", "is for sources of type passthrough, not memory"),
            ("passthrough", "handles=maybe", "one of auto|on|off"),
            ("passthrough", "max_write=1", "from 4096 to 1048576"),
            ("passthrough", "workers=+1", "a number from 1 to 1024"),
            ("passthrough", "workers=paper:0", "paper[:MAX] or merged[:MAX]"),
            ("passthrough", "workers=paper:", "paper[:MAX] or merged[:MAX]"),
            ("passthrough", "workers=1025", "a number from 1 to 1024"),
            ("passthrough", "workers=adaptive:3", "a number from 1 to 1024"),
            ("passthrough", "workers=paper,io_uring", "exclude each other"),
            ("passthrough", "io_uring,workers=merged:4", "exclude each other"),
            ("passthrough", "timeout=-1", "such as 1 or 0.5"),
            ("passthrough", "ro=1", "write just ro"),
            ("passthrough", "no_handle_killpriv_v3", "did you mean no_handle_killpriv_v2?"),
        ] {
            let text = error(backend, list);
            assert!(text.contains(says), "{list}: {text}");
        }
    }

    #[test]
    fn capabilities_are_switched_off_by_their_name() {
        let set = expect_parsed("memory", "no_handle_killpriv_v2,no_max_pages");
        assert_eq!(
            set.session.disabled,
            defuse_fuse::abi::FUSE_HANDLE_KILLPRIV_V2 | defuse_fuse::abi::FUSE_MAX_PAGES
        );
    }

    #[test]
    fn commas_may_be_escaped() {
        assert_eq!(split(r"a,b=c\,d,,e\\f"), ["a", "b=c,d", r"e\f"]);
        assert_eq!(split(&escape(r"a,b\c")), [r"a,b\c"]);
        assert_eq!(expect_parsed("memory", r"fsname=a\,b").mount.fsname, "a,b");
    }

    #[test]
    fn help_shows_every_option() {
        let text = help();
        for option in OPTIONS {
            assert!(text.contains(&option.form()), "{}", option.name);
        }
        assert!(text.contains("no_passthrough"));
    }
}
