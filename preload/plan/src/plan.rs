//! The plan of a run.

use crate::codec::{MalformedState, ValueReader, ValueWriter};
use crate::image::PatchedImage;

/// The policy for a mount's state when a program forks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ForkPolicy {
    /// The mode that the file system allows: `share` where its whole state is outside of the
    /// process, otherwise `server`.
    #[default]
    Auto,
    /// Parent and child go on with it, each by itself: right where nothing is kept in the process.
    Share,
    /// The child opens the file system again, and shares nothing with the parent.
    Reopen,
    /// The state moves to a process of its own, and parent and child become its clients.
    Server,
    /// fork(2) fails.
    Deny,
}

impl ForkPolicy {
    /// The words for it.
    pub const NAMES: [(&'static str, ForkPolicy); 5] = [
        ("auto", ForkPolicy::Auto),
        ("share", ForkPolicy::Share),
        ("reopen", ForkPolicy::Reopen),
        ("server", ForkPolicy::Server),
        ("deny", ForkPolicy::Deny),
    ];

    /// The policy of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, policy)| policy)
    }
}

/// Where the file system of a mount is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ServerPlace {
    /// In every process by itself.
    #[default]
    Program,
    /// At the socket of another process, by its path; one that begins with `@` is abstract.
    Socket(Vec<u8>),
    /// By the process that started the run. The number is the place of its socket among those that
    /// programs inherit ([`crate::InheritedDescriptors::sockets`]).
    Run(usize),
}

/// A mount of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountPlan {
    /// An absolute path, or a name with a colon at its end.
    pub target: Vec<u8>,
    /// The source, and options after commas: `passthrough:/srv,exclusive`.
    pub source: Vec<u8>,
    /// How it survives a fork.
    pub fork: ForkPolicy,
    /// The process that serves it.
    pub served_by: ServerPlace,
}

/// A place in an object file at which a `syscall` instruction is replaced by a jump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchSite {
    /// Virtual address of the first byte that is replaced, as in the object file.
    pub address: u64,
    /// How many bytes are replaced, 5 to 15.
    pub len: u8,
    /// Where among them the `syscall` is.
    pub syscall_at: u8,
    /// The number of the system call, if it is known.
    pub number: Option<u16>,
    /// The bytes as they have to be.
    pub bytes: [u8; 16],
}

/// The sites of one object file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectSites {
    /// Its build id (`NT_GNU_BUILD_ID`): nothing is patched where it differs.
    pub build_id: Vec<u8>,
    /// Where to patch, in the order of addresses.
    pub sites: Vec<PatchSite>,
    /// Its code with all of them patched, where it has been made.
    pub image: Option<PatchedImage>,
}

/// The plan that each program of a run receives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramPlan {
    /// The library, for the programs that follow.
    pub library: Vec<u8>,
    /// The mounts, in their order.
    pub mounts: Vec<MountPlan>,
    /// The sites to patch.
    pub objects: Vec<ObjectSites>,
    /// The kernel's restrictions on links: `fs.protected_symlinks`, `protected_hardlinks`,
    /// `protected_regular`. They are here because every program of a run would have to read them.
    pub protected: [u8; 3],
    /// True if system calls without the C library are served, too (syscall user dispatch).
    pub dispatch: bool,
    /// True if calls are counted (`--report`).
    pub report: bool,
    /// 128 random bits, by which the processes of the run name what they have in a directory that
    /// is not theirs alone ([`crate::layout::node_directory`]).
    pub token: u128,
}

impl ProgramPlan {
    /// The plan as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = ValueWriter::default();
        out.string(&self.library);
        let protected = self.protected.iter().rev().fold(0, |all, &one| all << 8 | u64::from(one));
        out.number(u64::from(self.dispatch) | u64::from(self.report) << 1 | protected << 8);
        out.number(self.mounts.len() as u64);
        for mount in &self.mounts {
            out.string(&mount.target);
            out.string(&mount.source);
            let policy = ForkPolicy::NAMES.iter().position(|(_, policy)| *policy == mount.fork);
            out.number(policy.unwrap_or(0) as u64);
            encode_server(&mut out, &mount.served_by);
        }
        out.number(self.objects.len() as u64);
        for object in &self.objects {
            out.string(&object.build_id);
            encode_sites(&mut out, &object.sites);
            encode_image(&mut out, object.image);
        }
        out.number(self.token as u64);
        out.number((self.token >> 64) as u64);
        out.bytes
    }

    /// The plan that `bytes` hold.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedState> {
        let mut from = ValueReader { bytes };
        let library = from.string()?.to_vec();
        let flags = from.number()?;
        let mounts =
            (0..from.count(32)?).map(|_| decode_mount(&mut from)).collect::<Result<_, _>>()?;
        let objects = (0..from.count(16)?).map(|_| decode_object(&mut from));
        let objects = objects.collect::<Result<_, _>>()?;
        let protected = [1, 2, 3].map(|byte| (flags >> (byte * 8)) as u8);
        let (dispatch, report) = (flags & 1 != 0, flags & 2 != 0);
        let token = u128::from(from.number()?) | u128::from(from.number()?) << 64;
        Ok(ProgramPlan { library, mounts, objects, protected, dispatch, report, token })
    }
}

fn decode_mount(from: &mut ValueReader<'_>) -> Result<MountPlan, MalformedState> {
    let target = from.string()?.to_vec();
    let source = from.string()?.to_vec();
    let policy = usize::try_from(from.number()?).map_err(|_| MalformedState)?;
    let fork = ForkPolicy::NAMES.get(policy).ok_or(MalformedState)?.1;
    Ok(MountPlan { target, source, fork, served_by: decode_server(from)? })
}

fn encode_server(out: &mut ValueWriter, served_by: &ServerPlace) {
    match served_by {
        ServerPlace::Program => out.number(0),
        ServerPlace::Socket(path) => {
            out.number(1);
            out.string(path);
        }
        ServerPlace::Run(place) => {
            out.number(2);
            out.number(*place as u64);
        }
    }
}

fn decode_server(from: &mut ValueReader<'_>) -> Result<ServerPlace, MalformedState> {
    Ok(match from.number()? {
        0 => ServerPlace::Program,
        1 => ServerPlace::Socket(from.string()?.to_vec()),
        2 => ServerPlace::Run(usize::try_from(from.number()?).map_err(|_| MalformedState)?),
        _ => return Err(MalformedState),
    })
}

/// No number.
const UNKNOWN: u64 = u16::MAX as u64;

pub(crate) fn encode_sites(out: &mut ValueWriter, sites: &[PatchSite]) {
    out.number(sites.len() as u64);
    sites.iter().for_each(|site| encode_site(out, site));
}

pub(crate) fn decode_sites(from: &mut ValueReader<'_>) -> Result<Vec<PatchSite>, MalformedState> {
    let count = from.count(32)?;
    let mut sites = Vec::with_capacity(count);
    for _ in 0..count {
        sites.push(decode_site(from)?);
    }
    Ok(sites)
}

fn encode_site(out: &mut ValueWriter, site: &PatchSite) {
    out.number(site.address);
    let number = site.number.map_or(UNKNOWN, u64::from);
    out.number(u64::from(site.len) | u64::from(site.syscall_at) << 8 | number << 16);
    out.bytes.extend_from_slice(&site.bytes);
}

fn decode_object(from: &mut ValueReader<'_>) -> Result<ObjectSites, MalformedState> {
    let (build_id, sites) = (from.string()?.to_vec(), decode_sites(from)?);
    Ok(ObjectSites { build_id, sites, image: decode_image(from)? })
}

/// A length of 0 stands for no image.
fn encode_image(out: &mut ValueWriter, image: Option<PatchedImage>) {
    let all = image.map_or([0; 4], |i| [i.len, i.from, i.place, i.trampolines_len]);
    all.into_iter().for_each(|number| out.number(number));
}

fn decode_image(from: &mut ValueReader<'_>) -> Result<Option<PatchedImage>, MalformedState> {
    let (len, at) = (from.number()?, from.number()?);
    let (place, trampolines_len) = (from.number()?, from.number()?);
    Ok((len > 0).then_some(PatchedImage { from: at, len, place, trampolines_len }))
}

fn decode_site(from: &mut ValueReader<'_>) -> Result<PatchSite, MalformedState> {
    let address = from.number()?;
    let packed = from.number()?;
    let (head, rest) = from.bytes.split_first_chunk::<16>().ok_or(MalformedState)?;
    from.bytes = rest;
    let number = packed >> 16 & 0xffff;
    let site = PatchSite {
        address,
        len: packed as u8,
        syscall_at: (packed >> 8) as u8,
        number: (number != UNKNOWN).then_some(number as u16),
        bytes: *head,
    };
    let fits = (5..=15).contains(&site.len) && site.syscall_at + 2 <= site.len;
    if fits { Ok(site) } else { Err(MalformedState) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> ProgramPlan {
        let site =
            PatchSite { address: 77, len: 7, syscall_at: 5, number: Some(0), bytes: [9; 16] };
        ProgramPlan {
            library: b"/lib/x.so".to_vec(),
            mounts: [
                ServerPlace::Program,
                ServerPlace::Socket(b"/run/s".to_vec()),
                ServerPlace::Run(3),
            ]
            .map(|served_by| MountPlan {
                target: b"/data".to_vec(),
                source: b"memory:,size=1G".to_vec(),
                fork: ForkPolicy::Deny,
                served_by,
            })
            .into(),
            objects: vec![
                ObjectSites {
                    build_id: vec![1, 2, 3],
                    sites: vec![site, PatchSite { number: None, ..site }],
                    image: Some(PatchedImage {
                        from: 4096,
                        len: 8192,
                        place: 0,
                        trampolines_len: 4096,
                    }),
                },
                ObjectSites { build_id: vec![4], sites: vec![site], image: None },
            ],
            protected: [1, 0, 2],
            dispatch: true,
            report: false,
            token: 7 << 100 | 9,
        }
    }

    #[test]
    fn a_plan_comes_back_as_it_was() {
        assert_eq!(ProgramPlan::decode(&plan().encode()), Ok(plan()));
    }

    #[test]
    fn a_plan_that_is_cut_short_is_refused() {
        let bytes = plan().encode();
        for len in 0..bytes.len() {
            assert_eq!(ProgramPlan::decode(&bytes[..len]), Err(MalformedState), "{len} bytes");
        }
    }
}
