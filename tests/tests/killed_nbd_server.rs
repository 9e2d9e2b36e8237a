//! The NBD server is killed without warning, again and again, under several connections with many requests under way. Each time no
//! checker may find corruption, and every sector must hold, whole, what it held at the last acknowledged flush or later.
//!
//! `BEDPLATE_KILLS` sets the number of kills of each image.

use anyhow::{Context, Result, bail, ensure};
use bedplate_nbd::NbdAddr;
use bedplate_nbd::client::{Client, Wanted};
use bedplate_nbd::proto::{command, command_flag};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::random::Random;
use bedplate_tests::{host, skip};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};

const CONNECTIONS: usize = 3;
/// Requests of one connection that are under way at once.
const DEPTH: usize = 8;
const BLOCK: usize = 4096;
const SECTOR: usize = 512;
/// Blocks of one connection.
const BLOCKS: usize = 500;
const KILLS: usize = 50;

/// What may be in one block. A value is the number of a write, or 0 for zeroes.
#[derive(Clone, Default)]
struct Block {
    /// What a flush has made durable, sector by sector (a kill may have cut a write off between two).
    durable: [u64; BLOCK / SECTOR],
    /// Sent later, oldest first.
    later: Vec<u64>,
}

impl Block {
    /// This write is durable, so nothing older may ever be seen again.
    fn settle(&mut self, value: u64) {
        if let Some(index) = self.later.iter().position(|later| *later == value) {
            self.durable = [value; BLOCK / SECTOR];
            self.later.drain(..=index);
        }
    }
}

/// Connections take turns, so that they share clusters and tables; the step is no multiple of a cluster.
fn place(connection: usize, block: usize) -> u64 {
    ((block * CONNECTIONS + connection) * 5 * BLOCK) as u64
}

/// A sector that says where it belongs and which write it is of.
fn sector(at: u64, value: u64) -> Vec<u8> {
    if value == 0 {
        return vec![0; SECTOR];
    }
    [at, value].map(u64::to_le_bytes).concat().iter().copied().cycle().take(SECTOR).collect()
}

fn content(at: u64, value: u64) -> Vec<u8> {
    (0..BLOCK / SECTOR).flat_map(|n| sector(at + (n * SECTOR) as u64, value)).collect()
}

enum Sent {
    Write { block: usize, value: u64, fua: bool },
    Trim { block: usize },
    Flush { covers: Vec<(usize, u64)> },
}

/// One connection's work and what it knows.
struct Load {
    number: usize,
    blocks: Vec<Block>,
    value: u64,
    /// Acknowledged writes that no flush has covered.
    completed: Vec<(usize, u64)>,
    random: Random,
}

impl Load {
    fn new(number: usize) -> Load {
        let blocks = vec![Block::default(); BLOCKS];
        Load { number, blocks, value: 0, completed: Vec::new(), random: Random::new(number as u64) }
    }

    /// Keeps requests under way until the server is gone; `done` counts each reply. An error reply fails the test.
    fn run(&mut self, client: &mut Client, done: impl Fn()) -> Result<()> {
        let mut sent: HashMap<u64, Sent> = HashMap::new();
        let mut busy: HashSet<usize> = HashSet::new();
        loop {
            while sent.len() < DEPTH {
                match self.send(client, &mut busy) {
                    Ok((cookie, request)) => drop(sent.insert(cookie, request)),
                    Err(_) => return Ok(()),
                }
            }
            let Ok(answer) = client.receive() else { return Ok(()) };
            ensure!(answer.error == 0, "the server reports error {}", answer.error);
            match sent.remove(&answer.cookie) {
                Some(Sent::Write { block, value, fua }) => {
                    busy.remove(&block);
                    if fua {
                        self.blocks[block].settle(value);
                    } else {
                        self.completed.push((block, value));
                    }
                }
                Some(Sent::Trim { block }) => drop(busy.remove(&block)),
                Some(Sent::Flush { covers }) => self.settle(covers),
                None => bail!("a reply to no request"),
            }
            done();
        }
    }

    fn settle(&mut self, covers: Vec<(usize, u64)>) {
        for (block, value) in covers {
            self.blocks[block].settle(value);
        }
    }

    fn send(&mut self, client: &mut Client, busy: &mut HashSet<usize>) -> Result<(u64, Sent)> {
        let kind = self.random.below(20);
        if kind == 0 {
            let cookie = client.send(command::FLUSH, 0, 0, 0, &[])?;
            return Ok((cookie, Sent::Flush { covers: std::mem::take(&mut self.completed) }));
        }
        let block = loop {
            let block = self.random.below(BLOCKS as u64) as usize;
            if busy.insert(block) {
                break block;
            }
        };
        let (at, len) = (place(self.number, block), BLOCK as u32);
        if kind == 1 {
            // The block may read as before or as zeroes, whatever is flushed.
            self.blocks[block].later.push(0);
            let cookie = client.send(command::TRIM, 0, at, len, &[])?;
            return Ok((cookie, Sent::Trim { block }));
        }
        self.value += 1;
        let value = self.value;
        self.blocks[block].later.push(value);
        let fua = kind == 2;
        let flags = if fua { command_flag::FUA } else { 0 };
        let cookie = client.send(command::WRITE, flags, at, len, &content(at, value))?;
        Ok((cookie, Sent::Write { block, value, fua }))
    }

    /// Each sector is, whole, one of those that may be there; what is there now stays.
    fn verify(&mut self, client: &mut Client) -> Result<()> {
        self.completed.clear();
        for (number, block) in self.blocks.iter_mut().enumerate() {
            let at = place(self.number, number);
            let answer = client.call(command::READ, 0, at, BLOCK as u32, &[])?;
            ensure!(answer.error == 0, "reading the block at {at} gives error {}", answer.error);
            for (index, found) in answer.data.chunks(SECTOR).enumerate() {
                let here = at + (index * SECTOR) as u64;
                let value = found[8..16].try_into().map_or(0, u64::from_le_bytes);
                ensure!(found == sector(here, value), "the sector at {here} is a mixture");
                ensure!(
                    value == block.durable[index] || block.later.contains(&value),
                    "the sector at {here} holds write {value}; {} is durable, {:?} came later",
                    block.durable[index],
                    block.later
                );
                block.durable[index] = value;
            }
            block.later.clear();
        }
        Ok(())
    }
}

fn connect(fixture: &Fixture) -> Result<Client> {
    let mut client = Client::connect(&NbdAddr::Unix(fixture.socket().to_path_buf()), 3)?;
    match client.go(b"", Wanted { structured: true, allocation: false })? {
        Ok(_) => Ok(client),
        Err(code) => bail!("the server refuses its export with {code:#x}"),
    }
}

/// Starts a server, checks what the last one left, and loads it until `until` replies have come; then `end` ends it.
fn round(
    fixture: &Fixture,
    loads: &mut [Load],
    until: u64,
    end: impl FnOnce(bedplate_tests::server::Server) -> Result<()>,
) -> Result<()> {
    let server = fixture.serve()?;
    let mut clients = loads.iter().map(|_| connect(fixture)).collect::<Result<Vec<_>>>()?;
    for (load, client) in loads.iter_mut().zip(&mut clients) {
        load.verify(client)?;
    }
    let replies = AtomicU64::new(0);
    let (enough, reached) = channel();
    std::thread::scope(|scope| -> Result<()> {
        let mut threads = Vec::new();
        for (load, client) in loads.iter_mut().zip(&mut clients) {
            let (replies, enough): (_, Sender<()>) = (&replies, enough.clone());
            threads.push(scope.spawn(move || {
                load.run(client, || {
                    if replies.fetch_add(1, Ordering::Relaxed) + 1 == until {
                        // Nobody listens when the server has ended already, which `end` reports.
                        let _ = enough.send(());
                    }
                })
            }));
        }
        drop(enough);
        // An error here: all connections ended before.
        let early = reached.recv().is_err();
        let ended = end(server);
        for thread in threads {
            thread.join().expect("no panic")?;
        }
        ended?;
        ensure!(!early, "the connections ended by themselves");
        Ok(())
    })
}

fn fixture(format: &str, options: &str) -> Result<Fixture> {
    let fixture = Fixture::new(format, "128M")?.over_nbd();
    if format == "qcow2" {
        let mut create = host::tool("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-o", options]).arg(fixture.image());
        host::run(create.arg("128M"))?;
    }
    Ok(fixture)
}

fn have_qemu_img(test: &str) -> bool {
    let have = host::which("qemu-img").is_some();
    if !have {
        skip(test, "qemu-img is not installed");
    }
    have
}

fn kill_again_and_again(format: &str, options: &str) -> Result<()> {
    let fixture = fixture(format, options)?;
    let mut loads: Vec<Load> = (0..CONNECTIONS).map(Load::new).collect();
    let mut random = Random::new(2026);
    let kills = std::env::var("BEDPLATE_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(KILLS);
    for kill in 0..kills {
        let until = 1 + random.below([40, 400, 2000][kill % 3]);
        round(&fixture, &mut loads, until, |server| server.kill())
            .and_then(|()| fixture.assert_not_corrupt())
            .with_context(|| format!("around kill {kill}, after {until} replies"))?;
    }
    // A last server takes the image over and finds all in order.
    let server = fixture.serve()?;
    let mut client = connect(&fixture)?;
    for load in &mut loads {
        load.verify(&mut client).context("after the last kill")?;
    }
    server.stop()?;
    fixture.assert_not_corrupt()?;
    ensure!(
        loads.iter().flat_map(|load| &load.blocks).any(|block| block.durable != [0; 8]),
        "nothing was ever durable"
    );
    Ok(())
}

#[test]
fn kills_lose_nothing_flushed_of_a_qcow2_image_with_large_clusters() -> Result<()> {
    if !have_qemu_img("kills_lose_nothing_flushed_of_a_qcow2_image_with_large_clusters") {
        return Ok(());
    }
    kill_again_and_again("qcow2", "cluster_size=64k")
}

#[test]
fn kills_lose_nothing_flushed_of_a_qcow2_image_with_small_clusters() -> Result<()> {
    if !have_qemu_img("kills_lose_nothing_flushed_of_a_qcow2_image_with_small_clusters") {
        return Ok(());
    }
    kill_again_and_again("qcow2", "cluster_size=4k")
}

#[test]
fn kills_lose_nothing_flushed_of_a_raw_image() -> Result<()> {
    kill_again_and_again("raw", "")
}

#[test]
fn a_stop_under_load_leaves_a_clean_image_with_all_that_was_acknowledged() -> Result<()> {
    if !have_qemu_img("a_stop_under_load_leaves_a_clean_image_with_all_that_was_acknowledged") {
        return Ok(());
    }
    for (format, options) in
        [("qcow2", "cluster_size=64k"), ("qcow2", "lazy_refcounts=on"), ("raw", "")]
    {
        let fixture = fixture(format, options)?;
        let mut loads: Vec<Load> = (0..CONNECTIONS).map(Load::new).collect();
        for until in [1, 150, 1000] {
            round(&fixture, &mut loads, until, |server| server.stop().map(drop))
                .and_then(|()| fixture.assert_clean())
                .with_context(|| format!("{format} with '{options}', after {until} replies"))?;
            // No flush is needed: a stop makes durable what was acknowledged.
            for load in &mut loads {
                let completed = std::mem::take(&mut load.completed);
                load.settle(completed);
            }
        }
        let server = fixture.serve()?;
        let mut client = connect(&fixture)?;
        for load in &mut loads {
            load.verify(&mut client).context("after the last stop")?;
        }
        server.stop()?;
        fixture.assert_clean()?;
    }
    Ok(())
}
