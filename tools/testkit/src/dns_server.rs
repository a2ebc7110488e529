//! A DNS server on loopback whose records a test changes, over UDP and TCP. A name without records does not exist.

#![allow(missing_docs, reason = "parts of tests")]

use hickory_resolver::proto::op::{Message, OpCode, Query, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, AAAA, SRV};
use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};
use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Answers that are larger come over TCP.
const DATAGRAM: usize = 512;

#[derive(Default)]
struct Zone {
    names: Mutex<HashMap<Name, Vec<RData>>>,
    silent: AtomicBool,
    stop: AtomicBool,
}

/// The server; it ends when it is dropped.
pub struct DnsServer {
    address: SocketAddr,
    zone: Arc<Zone>,
}

impl DnsServer {
    pub fn start() -> io::Result<Self> {
        let (udp, tcp) = loop {
            let udp = UdpSocket::bind("127.0.0.1:0")?;
            // The same port over TCP, unless it is in use.
            if let Ok(tcp) = TcpListener::bind(udp.local_addr()?) {
                break (udp, tcp);
            }
        };
        let address = udp.local_addr()?;
        udp.set_read_timeout(Some(Duration::from_millis(100)))?;
        tcp.set_nonblocking(true)?;
        let zone = Arc::new(Zone::default());
        let of_udp = Arc::clone(&zone);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while !of_udp.stop.load(Ordering::Relaxed) {
                let Ok((len, from)) = udp.recv_from(&mut bytes) else { continue };
                if let Some(answer) = of_udp.answer(&bytes[..len], true) {
                    let _ = udp.send_to(&answer, from);
                }
            }
        });
        let of_tcp = Arc::clone(&zone);
        std::thread::spawn(move || {
            while !of_tcp.stop.load(Ordering::Relaxed) {
                match tcp.accept() {
                    Ok((stream, _)) => {
                        let zone = Arc::clone(&of_tcp);
                        std::thread::spawn(move || zone.converse(stream));
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(10)),
                }
            }
        });
        Ok(DnsServer { address, zone })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The addresses behind a name; none takes the name away.
    pub fn addresses(&self, name: &str, addresses: &[&str]) {
        let data = addresses.iter().map(|text| match text.parse().unwrap() {
            IpAddr::V4(ip) => RData::A(A(ip)),
            IpAddr::V6(ip) => RData::AAAA(AAAA(ip)),
        });
        self.set(name, data.collect());
    }

    /// The hosts and ports behind a service's name.
    pub fn services(&self, name: &str, targets: &[(&str, u16)]) {
        let data = targets.iter().map(|(host, port)| RData::SRV(SRV::new(0, 0, *port, host.parse().unwrap())));
        self.set(name, data.collect());
    }

    fn set(&self, name: &str, data: Vec<RData>) {
        let mut names = self.zone.names.lock().unwrap();
        if data.is_empty() {
            names.remove(&name.parse().unwrap());
        } else {
            names.insert(name.parse().unwrap(), data);
        }
    }

    /// Accepts questions and answers none.
    pub fn silent(&self, silent: bool) {
        self.zone.silent.store(silent, Ordering::Relaxed);
    }
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        self.zone.stop.store(true, Ordering::Relaxed);
    }
}

impl Zone {
    fn converse(&self, mut stream: TcpStream) {
        // What was accepted may be non-blocking, as the listener is.
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
        let mut len = [0; 2];
        while stream.read_exact(&mut len).is_ok() {
            let mut question = vec![0; usize::from(u16::from_be_bytes(len))];
            if stream.read_exact(&mut question).is_err() {
                return;
            }
            let Some(answer) = self.answer(&question, false) else { return };
            let framed = [&(answer.len() as u16).to_be_bytes()[..], &answer].concat();
            if stream.write_all(&framed).is_err() {
                return;
            }
        }
    }

    fn answer(&self, bytes: &[u8], small: bool) -> Option<Vec<u8>> {
        if self.silent.load(Ordering::Relaxed) {
            return None;
        }
        let question = Message::from_vec(bytes).ok()?;
        let query: Query = question.queries.first()?.clone();
        let mut answer = Message::response(question.metadata.id, OpCode::Query);
        answer.metadata.authoritative = true;
        let kind = |data: &RData| match data {
            RData::A(_) => RecordType::A,
            RData::AAAA(_) => RecordType::AAAA,
            _ => RecordType::SRV,
        };
        match self.names.lock().unwrap().get(query.name()) {
            None => answer.metadata.response_code = ResponseCode::NXDomain,
            Some(all) => {
                for data in all.iter().filter(|data| kind(data) == query.query_type()) {
                    answer.add_answer(Record::from_rdata(query.name().clone(), 1, data.clone()));
                }
            }
        }
        answer.add_query(query);
        let whole = answer.to_vec().ok()?;
        if small && whole.len() > DATAGRAM { answer.truncate().to_vec().ok() } else { Some(whole) }
    }
}
