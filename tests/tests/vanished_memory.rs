//! A front end takes memory away that it has shared, while its requests run. It loses its connection; the server and its other
//! exports go on.

use anyhow::{Context, Result, ensure};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::host;
use bedplate_vhost_user::frontend::{Buffer, Client, ClientOptions, Queue};
use std::fs::File;
use std::path::Path;
use std::time::Duration;

fn connect(socket: &Path) -> Result<(Client, Queue)> {
    let mut client = Client::connect(socket, &ClientOptions::default())?;
    let queue = client.take_queues().remove(0);
    Ok((client, queue))
}

fn shorten(client: &Client, len: u64) -> Result<()> {
    Ok(File::from(client.memory().fd().try_clone()?).set_len(len)?)
}

/// Lays writes of `len` bytes out in all of the queue and sends them; their memory is what the queue has anyway.
fn send_writes(queue: &mut Queue, len: u32) {
    let (room, _) = queue.room();
    for n in 0..queue.size() / 4 {
        let header = room + u64::from(n) * 64;
        let sector = u64::from(n + 1) * 1024 + 8 * u64::from(n % 3);
        let bytes = [&1_u32.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        queue.memory().write(header, &bytes);
        let chain = [
            Buffer { addr: header, len: 16, write: false },
            Buffer { addr: room + (1 << 20) + u64::from(n) * 4096, len, write: false },
            Buffer { addr: header + 32, len: 1, write: true },
        ];
        queue.lay_out(n * 3, &chain);
        queue.submit(n * 3);
    }
}

#[test]
fn a_front_end_that_shortens_its_memory_loses_its_connection_and_nobody_else_notices() -> Result<()>
{
    for format in ["raw", "qcow2"] {
        let other = tempfile::tempdir()?;
        let other = other.path().join("other");
        let more = ["--vhost-user-blk", other.to_str().context("a path of text")?];
        let fixture = Fixture::new(format, "256M")?.option(&more);
        let server = fixture.serve()?;
        let limit = Duration::from_secs(30);
        let second = host::wait_for("the second export", limit, || Ok(connect(&other).ok()))?;
        let (_spared, mut spared) = second;
        spared.write(200 << 20, &[5; 8192])?;
        for (len, shorter) in [(4096, 0), (4096, 4096), (4000, 0), (4096, 1 << 20), (512, 1 << 20)]
        {
            let (mut client, mut queue) = connect(fixture.socket())?;
            queue.write(0, &[7; 4096])?;
            send_writes(&mut queue, len);
            shorten(&client, shorter)?;
            send_writes(&mut queue, len);
            spared.write(200 << 20, &[6; 8192])?;
            if shorter == 0 {
                // Answers come until it is noticed; then the connection ends.
                while client.capacity().is_ok() {
                    queue.kick().write(1)?;
                }
            }
            ensure!(spared.read(200 << 20, 8192)? == [6; 8192]);
        }
        // The next one on the same socket finds the disk as it was.
        let (_client, mut queue) = connect(fixture.socket())?;
        ensure!(queue.read(0, 512)? == [7; 512], "the disk is as it was");
        queue.flush()?;
        let log = server.stop()?;
        ensure!(log.contains("guest memory that it had shared is gone"), "{log}");
        fixture.assert_clean()?;
    }
    Ok(())
}
