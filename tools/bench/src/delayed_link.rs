//! A relay of TCP connections on loopback through which bytes arrive later: a link with a long round trip and a rate, also where the
//! kernel has no netem. Knows no service.

use crate::error::{BenchError, Result};
use parking_lot::Mutex;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// The longest piece that is relayed as one.
const PIECE_BYTES: usize = 128 << 10;
/// Pieces of a connection on their way, at most: 128 MiB, more than a round trip needs.
const PIECES_ON_THE_WAY: usize = 1024;
/// Time that a link may have been idle and makes up for: more than a sleep is too long.
const LINK_SLACK: Duration = Duration::from_millis(2);

/// The relay, until a drop. A connection ends with the client or the server.
#[derive(Debug)]
pub struct DelayedLink {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
}

/// A direction of the link, which all connections share.
#[derive(Debug)]
struct LinkWay {
    delay: Duration,
    /// None without a limit.
    bytes_per_second: Option<u64>,
    /// When the bytes so far have left.
    free: Mutex<Instant>,
}

/// Bytes on their way.
struct DelayedPiece {
    due: Instant,
    bytes: Vec<u8>,
}

impl DelayedLink {
    /// Listens on a free port of loopback, and relays connections to `target`, with half of `round_trip` each way, and the bytes of
    /// all connections together at `bytes_per_second` each way.
    pub fn start(target: SocketAddr, round_trip: Duration, bytes_per_second: Option<u64>) -> Result<DelayedLink> {
        let failed = |error: std::io::Error| BenchError::io("can't start the relay of the delayed link", &error);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stopping);
        let ways = [(); 2].map(|()| Arc::new(LinkWay::new(round_trip / 2, bytes_per_second)));
        let accept = move || accept_connections(&listener, target, &ways, &told);
        std::thread::Builder::new().name("delayed-link".to_owned()).spawn(accept).map_err(failed)?;
        Ok(DelayedLink { address, stopping })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for DelayedLink {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

impl LinkWay {
    fn new(delay: Duration, bytes_per_second: Option<u64>) -> LinkWay {
        LinkWay { delay, bytes_per_second, free: Mutex::new(Instant::now()) }
    }

    /// Waits until `len` bytes have left by this way; returns when the last arrives.
    fn pass(&self, len: usize) -> Instant {
        let now = Instant::now();
        let Some(rate) = self.bytes_per_second else { return now + self.delay };
        let left = {
            let mut free = self.free.lock();
            *free = (*free).max(now - LINK_SLACK) + Duration::from_secs_f64(len as f64 / rate as f64);
            *free
        };
        std::thread::sleep(left.saturating_duration_since(now));
        left.max(now) + self.delay
    }
}

fn accept_connections(listener: &TcpListener, target: SocketAddr, ways: &[Arc<LinkWay>; 2], stopping: &AtomicBool) {
    for client in listener.incoming() {
        if stopping.load(Ordering::Acquire) {
            return;
        }
        // The client sees the failure of its connection.
        let _ = client.and_then(|client| relay_connection(&client, target, ways));
    }
}

fn relay_connection(client: &TcpStream, target: SocketAddr, ways: &[Arc<LinkWay>; 2]) -> std::io::Result<()> {
    let server = TcpStream::connect(target)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    relay_bytes(client.try_clone()?, server.try_clone()?, &ways[0])?;
    relay_bytes(server, client.try_clone()?, &ways[1])
}

/// Relays bytes in one direction, until the sender ends it.
fn relay_bytes(from: TcpStream, to: TcpStream, way: &Arc<LinkWay>) -> std::io::Result<()> {
    let way = Arc::clone(way);
    let (sender, receiver) = sync_channel(PIECES_ON_THE_WAY);
    let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
    named("delayed-in").spawn(move || take_pieces(from, &sender, &way))?;
    named("delayed-out").spawn(move || deliver_pieces(to, &receiver))?;
    Ok(())
}

fn take_pieces(mut from: TcpStream, sender: &SyncSender<DelayedPiece>, way: &LinkWay) {
    let mut buffer = vec![0; PIECE_BYTES];
    while let Ok(len) = from.read(&mut buffer)
        && len > 0
    {
        let piece = DelayedPiece { due: way.pass(len), bytes: buffer[..len].to_vec() };
        if sender.send(piece).is_err() {
            return;
        }
    }
}

fn deliver_pieces(mut to: TcpStream, receiver: &Receiver<DelayedPiece>) {
    while let Ok(piece) = receiver.recv() {
        std::thread::sleep(piece.due.saturating_duration_since(Instant::now()));
        if to.write_all(&piece.bytes).is_err() {
            break;
        }
    }
    // The other end may have closed the connection.
    let _ = to.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_whole_and_late() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let link = DelayedLink::start(server.local_addr().unwrap(), Duration::from_millis(60), Some(20 << 20)).unwrap();
        let echo = std::thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            let mut bytes = vec![0; 1 << 20];
            stream.read_exact(&mut bytes).unwrap();
            stream.write_all(&bytes).unwrap();
        });
        let sent: Vec<u8> = (0..1u32 << 20).map(|at| (at / 7) as u8).collect();
        let began = Instant::now();
        let mut client = TcpStream::connect(link.address()).unwrap();
        client.write_all(&sent).unwrap();
        let mut found = Vec::new();
        client.read_to_end(&mut found).unwrap();
        // A round trip, and a twentieth of a second for the answer.
        assert!(began.elapsed() >= Duration::from_millis(100));
        assert!(found == sent);
        echo.join().unwrap();
    }
}
