//! Several clients of one server at once: each operation of the model by one of them at random,
//! while the others look at names, attributes and data. Whatever a client keeps, it must answer as
//! if there were one client.

mod offers;
#[allow(dead_code)] // Not all of it is used here.
mod served;
mod spread;

use std::sync::{Arc, Barrier};

use defuse_block::RamDevice;
use defuse_fs::{Errno, File, FileKind, FileSystem, Ino, NewNode, OpenArgs, OpenFlags};
use defuse_memory::MemoryFileSystem;
use defuse_passthrough::Passthrough;
use defuse_testkit::model::{MissingPolicy, check_some};
use defuse_uhs::Uhs;
use offers::serve;
use served::{context, create, name, read, write};
use spread::SpreadClients;

/// Random sequences for each number of clients.
const SEQUENCES: u32 = 20;

fn one_two_and_eight_clients(
    missing: MissingPolicy,
    keep: bool,
    make: impl Fn() -> Arc<dyn FileSystem>,
) {
    // With one client, so that a difference with several of them comes from the others.
    check_some(missing, SEQUENCES, || Arc::new(serve(make()).with_client()));
    for clients in [2, 8] {
        check_some(missing, SEQUENCES, || {
            Arc::new(SpreadClients::connect_to(serve(make()), clients, keep))
        });
    }
}

#[test]
fn clients_of_memory_do_together_what_the_model_does() {
    let make = || -> Arc<dyn FileSystem> { Arc::new(MemoryFileSystem::new(Default::default())) };
    one_two_and_eight_clients(MissingPolicy::Refused, true, make);
}

#[test]
fn clients_of_a_directory_do_together_what_the_model_does() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root may change owners");
        return;
    }
    let dirs = tempfile::tempdir().unwrap();
    one_two_and_eight_clients(MissingPolicy::Refused, false, || {
        let dir = tempfile::tempdir_in(dirs.path()).unwrap().keep();
        Arc::new(Passthrough::new(&dir, Default::default()).unwrap())
    });
}

#[test]
fn clients_of_uhs_do_together_what_the_model_does() {
    let options = defuse_uhs::UhsOptions {
        commit: None,
        cache_pages: 64,
        dirty_pages: 16,
        ..Default::default()
    };
    one_two_and_eight_clients(MissingPolicy::Allowed, true, || {
        let device = Arc::new(RamDevice::new(4096, 4096));
        let mut random = fastrand::Rng::with_seed(1);
        Uhs::make(device.clone(), (0o1777, 0, 0), &mut random).unwrap();
        Arc::new(Uhs::open(device, options, random).unwrap().0)
    });
}

/// Makes, links, renames and removes one name by eight clients at once: one of them succeeds, and
/// the others get the right error. All clients see the data that each of them writes.
#[test]
fn of_clients_that_change_one_name_at_once_one_does() {
    const CLIENTS: usize = 8;
    const ROUNDS: usize = 60;
    let served = serve(Arc::new(MemoryFileSystem::new(Default::default())));
    let clients: Vec<_> = (0..CLIENTS).map(|_| served.client()).collect();
    let (shared, _) = create(&clients[0], "shared");
    let (barrier, cx) = (Barrier::new(CLIENTS), context());
    let won = std::thread::scope(|scope| {
        let run = |number: usize| {
            let (client, barrier) = (&clients[number], &barrier);
            scope.spawn(move || {
                let file = client.lookup(&cx, Ino::ROOT, name("shared")).unwrap();
                assert_eq!(file.ino, shared.ino);
                let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), kill_suidgid: false };
                let fh = client.open(&cx, file.ino, args).unwrap().fh;
                let file = File { ino: file.ino, fh };
                let (mut won, node) = ([0; 4], NewNode::new(FileKind::Regular, 0o600, cx.caller));
                for round in 0..ROUNDS {
                    let [first, second, own] =
                        [format!("{round}"), format!("{round}.2"), format!("{round} of {number}")];
                    let [first, second, own] = [name(&first), name(&second), name(&own)];
                    let root = Ino::ROOT;
                    barrier.wait();
                    let made = client.mknod(&cx, root, first, &node).map(drop);
                    barrier.wait();
                    let ino = client.lookup(&cx, root, first).unwrap().ino;
                    let linked = client.link(&cx, ino, root, second).map(drop);
                    barrier.wait();
                    let renamed =
                        client.rename(&cx, (root, first), (root, own), Default::default());
                    barrier.wait();
                    let removed = client.unlink(&cx, root, second);
                    for (at, (done, lost)) in [
                        (made, Errno::EEXIST),
                        (linked, Errno::EEXIST),
                        (renamed, Errno::ENOENT),
                        (removed, Errno::ENOENT),
                    ]
                    .into_iter()
                    .enumerate()
                    {
                        match done {
                            Ok(()) => won[at] += 1,
                            Err(errno) => assert_eq!(errno, lost, "{at}"),
                        }
                    }
                    let offset = (round * CLIENTS + number) as u64 * 100;
                    assert_eq!(write(client, file, offset, &[number as u8 + 1; 100]), Ok(100));
                    barrier.wait();
                    let all = read(client, file, 0, (round + 1) * CLIENTS * 100).unwrap();
                    assert_eq!(all.len(), (round + 1) * CLIENTS * 100);
                    let of = |at: usize| (at / 100 % CLIENTS) as u8 + 1;
                    assert!(all.iter().enumerate().all(|(at, byte)| *byte == of(at)), "{round}");
                    barrier.wait();
                }
                won
            })
        };
        let threads: Vec<_> = (0..CLIENTS).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    for at in 0..4 {
        assert_eq!(won.iter().map(|won| won[at]).sum::<usize>(), ROUNDS, "{at}");
    }
}
