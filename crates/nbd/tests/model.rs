//! Several connections work on interleaved blocks of one disk at once, and each knows what its blocks must hold.

mod common;

use bedplate_nbd::client::{Answer, Client};
use bedplate_nbd::proto::{command, command_flag};
use bedplate_types::CacheMode;
use common::{How, Served, arg, have, run, serve};
use std::thread;

const CLIENTS: u64 = 4;
/// Blocks belong to clients in turn; the size makes most requests start and end inside clusters and sectors.
const BLOCK: u64 = 1536;
const BLOCKS: u64 = 800;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// One client and what it knows: `None` where a trim leaves the content open.
struct Actor {
    client: Client,
    random: Random,
    me: u64,
    known: Vec<Option<u8>>,
}

impl Actor {
    fn at(&self, i: usize) -> u64 {
        (i as u64 * CLIENTS + self.me) * BLOCK
    }

    fn check(&self, i: usize, answer: &Answer) {
        if let Some(byte) = self.known[i] {
            assert_eq!(answer.data.len() as u64, BLOCK);
            assert!(answer.data.iter().all(|b| *b == byte), "block {i} of client {}", self.me);
        }
    }

    /// Several requests to different blocks at once, then all of their replies.
    fn round(&mut self) {
        let count = 1 + self.random.below(12);
        let mut sent = Vec::new();
        for _ in 0..count {
            let i = self.random.below(self.known.len() as u64) as usize;
            if sent.iter().any(|(_, other, _)| *other == i) {
                continue;
            }
            let (at, len) = (self.at(i), BLOCK as u32);
            let byte = 1 + self.random.below(255) as u8;
            let (cmd, flags, after) = match self.random.below(10) {
                0..4 => (command::WRITE, 0, Some(Some(byte))),
                4 => (command::WRITE, command_flag::FUA, Some(Some(byte))),
                5 => (command::WRITE_ZEROES, 0, Some(Some(0))),
                6 => (command::WRITE_ZEROES, command_flag::NO_HOLE, Some(Some(0))),
                7 => (command::TRIM, 0, Some(None)),
                _ => (command::READ, 0, None),
            };
            let data = vec![byte; if cmd == command::WRITE { BLOCK as usize } else { 0 }];
            let cookie = self.client.send(cmd, flags, at, len, &data).expect("sent");
            sent.push((cookie, i, after));
        }
        let flush = (self.random.below(8) == 0)
            .then(|| self.client.send(command::FLUSH, 0, 0, 0, &[]).expect("sent"));
        for _ in 0..sent.len() + usize::from(flush.is_some()) {
            let answer = self.client.receive().expect("a reply");
            assert_eq!(answer.error, 0);
            if flush == Some(answer.cookie) {
                continue;
            }
            let found = sent.iter().position(|(cookie, ..)| *cookie == answer.cookie);
            let (_, i, after) = sent.swap_remove(found.expect("a reply to what was asked"));
            match after {
                Some(state) => self.known[i] = state,
                None => self.check(i, &answer),
            }
        }
        assert!(sent.is_empty());
    }

    fn read_all(&mut self) {
        for i in 0..self.known.len() {
            let (at, len) = (self.at(i), BLOCK as u32);
            let answer = self.client.call(command::READ, 0, at, len, &[]).expect("a reply");
            self.check(i, &answer);
        }
    }
}

fn play(s: &Served, seed: u64) {
    let actors: Vec<_> = (0..CLIENTS)
        .map(|me| {
            let known = vec![Some(0); (BLOCKS / CLIENTS) as usize];
            let random = Random(seed * 1000 + me + 1);
            let mut actor = Actor { client: s.client(), random, me, known };
            thread::spawn(move || {
                (0..150).for_each(|_| actor.round());
                actor.read_all();
                actor
            })
        })
        .collect();
    // What was written on one connection is what another reads.
    let mut actors: Vec<Actor> = actors.into_iter().map(|a| a.join().expect("no fault")).collect();
    for actor in &mut actors {
        actor.client = s.client();
        actor.read_all();
    }
}

#[test]
fn connections_on_one_disk_never_see_what_they_did_not_write() {
    let content = vec![0; (BLOCK * BLOCKS) as usize];
    for cache in [CacheMode::None, CacheMode::Writeback] {
        for qcow2 in [false, true] {
            if qcow2 && !have("qemu-img") {
                continue;
            }
            for seed in 1..4 {
                let s = serve(&content, How { qcow2, cache, ..How::default() });
                play(&s, seed);
                let (_dir, file) = s.close();
                if qcow2 {
                    run("qemu-img", &["check", "-f", "qcow2", arg(&file)]);
                }
            }
        }
    }
}
