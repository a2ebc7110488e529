//! Admission: right, wrong, missing and changed tokens, a replayed handshake, garbage, silence, floods.

use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_proto::{HelloRequest, NodeRequest, WelcomeAnswer};
use spurline_transport::{ConnState, Connector as _, Responder, Service, perform_handshake};
use spurline_trust::{GroupTokens, Trust};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TOKEN: &str = "q5Ykm0WJ7b2uR1xTzv9sLd3f";
const OTHER: &str = "another-WJ7b2uR1xTzv9sLd3f";

/// Answers handshakes, and fails the test on any other request.
struct Greets;

impl Service for Greets {
    fn handle_hello(&self, _: &ConnState, _: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        Ok(WelcomeAnswer { block_size: 1, node: "n".into(), ..WelcomeAnswer::default() })
    }
    fn serve_request(&self, _: &ConnState, request: NodeRequest<'_>, _: &mut dyn Responder) -> Result<()> {
        panic!("{request} reached the service");
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let give_up = soon();
    while !done() {
        assert!(Instant::now() < give_up, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn trust(tokens: &[&str]) -> Arc<Trust> {
    if tokens.is_empty() {
        return Trust::without_checks();
    }
    Trust::with_tokens("somebody", GroupTokens::parse(tokens.join("\n").as_bytes()).unwrap())
}

struct Node {
    server: TcpServer,
    stats: Arc<Stats>,
}

impl Node {
    fn with(config: ServerConfig) -> Node {
        let stats = Arc::new(Stats::default());
        let any = ["127.0.0.1:0".parse().unwrap()];
        let server = TcpServer::bind(&any, Arc::new(Greets), config, Arc::clone(&stats)).unwrap();
        Node { server, stats }
    }
    fn new(tokens: &[&str]) -> Node {
        Node::with(ServerConfig { trust: trust(tokens), ..ServerConfig::default() })
    }
    fn addr(&self) -> SocketAddr {
        self.server.local_addrs()[0]
    }
    fn socket(&self) -> TcpStream {
        let socket = TcpStream::connect(self.addr()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket
    }
}

fn connect(addr: SocketAddr, tokens: &[&str]) -> Result<WelcomeAnswer> {
    connect_as(addr, trust(tokens))
}

fn connect_as(addr: SocketAddr, trust: Arc<Trust>) -> Result<WelcomeAnswer> {
    let connector = TcpConnector::new(&addr.to_string(), vec![], SocketOptions::default(), Arc::default());
    let mut channel = connector.with_trust(trust).connect(soon())?;
    perform_handshake(&mut *channel, &HelloRequest::new("t", "s"), soon()).map_err(Error::from)
}

#[test]
fn right_wrong_missing_and_changed_tokens() {
    let node = Node::new(&[TOKEN]);
    connect(node.addr(), &[TOKEN]).unwrap();
    connect(node.addr(), &[TOKEN, OTHER]).unwrap();
    for (tokens, says) in [(vec![OTHER], "another group token"), (vec![], "gave none")] {
        let error = connect(node.addr(), &tokens).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        assert!(error.to_string().contains(says) && error.to_string().contains("--group-token-file"), "{error}");
        assert!(!error.to_string().contains(TOKEN) && !error.to_string().contains(OTHER), "{error}");
    }
    // The refused peer may see the refusal before it is counted.
    until("both refusals are counted", || node.stats.trust.refused_proof.get() == 2);
    assert_eq!(node.stats.trust.proved.get(), 2);
    // A node without a token gives no proof, and a peer with a token does not use it.
    let open = Node::new(&[]);
    connect(open.addr(), &[]).unwrap();
    let error = connect(open.addr(), &[TOKEN]).unwrap_err();
    assert!(
        error.kind() == ErrorKind::PermissionDenied && error.to_string().contains("requires no group token"),
        "{error}"
    );
    // Old and new at the same time.
    let both = Node::new(&[TOKEN, OTHER]);
    connect(both.addr(), &[TOKEN]).unwrap();
    connect(both.addr(), &[OTHER]).unwrap();
}

/// A proxy that keeps what the reader sent and what the node did.
fn recorded(node: SocketAddr, pass: impl FnOnce(SocketAddr)) -> (Vec<u8>, Vec<u8>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let proxy = std::thread::spawn(move || {
        let (reader, _) = listener.accept().unwrap();
        let to = TcpStream::connect(node).unwrap();
        let copy = |mut from: TcpStream, mut to: TcpStream| {
            std::thread::spawn(move || {
                let (mut all, mut part) = (Vec::new(), [0; 4096]);
                while let Ok(n @ 1..) = from.read(&mut part) {
                    all.extend_from_slice(&part[..n]);
                    if to.write_all(&part[..n]).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(Shutdown::Write);
                all
            })
        };
        let there = copy(reader.try_clone().unwrap(), to.try_clone().unwrap());
        let back = copy(to, reader);
        (there.join().unwrap(), back.join().unwrap())
    });
    pass(addr);
    proxy.join().unwrap()
}

#[test]
fn a_recorded_greeting_is_worth_nothing_and_the_token_is_not_in_it() {
    let node = Node::new(&[TOKEN]);
    let (sent, answered) = recorded(node.addr(), |proxy| {
        connect(proxy, &[TOKEN]).unwrap();
    });
    let has = |bytes: &[u8], part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
    assert!(has(&sent, b"SPUR") && !has(&sent, TOKEN.as_bytes()) && !has(&answered, TOKEN.as_bytes()));
    // The same bytes to the same node: its nonce differs, so the old proof is wrong.
    let before = node.stats.trust.proved.get();
    let mut socket = node.socket();
    socket.write_all(&sent).unwrap();
    let mut said = Vec::new();
    let _ = socket.read_to_end(&mut said);
    assert_eq!(node.stats.trust.proved.get(), before);
    until("the replay is counted", || node.stats.trust.refused_proof.get() == 1);
    // A node's recorded answers do not prove another node either.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rogue = listener.local_addr().unwrap();
    let playing = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.write_all(&answered).unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
    });
    assert!(connect(rogue, &[TOKEN]).is_err());
    playing.join().unwrap();
}

#[test]
fn a_reader_does_not_take_a_reflected_proof() {
    // A node without the token that reflects every message as an answer.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rogue = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        use spurline_proto::{
            AnswerBody as _, ChallengeAnswer, FrameHeader, FrameOp, HEADER_LEN, NONCE_LEN, TokenProof, frame_padding,
        };
        let (mut socket, _) = listener.accept().unwrap();
        loop {
            let mut head = [0; HEADER_LEN];
            if socket.read_exact(&mut head).is_err() {
                return;
            }
            let header = FrameHeader::decode(&head).unwrap();
            let len = header.body_len as usize;
            let mut body = vec![0; len + frame_padding(len).len()];
            socket.read_exact(&mut body).unwrap();
            let mut out = Vec::new();
            match header.op {
                FrameOp::Challenge => ChallengeAnswer { nonce: [7; NONCE_LEN], node: "rogue".into() }.encode(&mut out),
                _ => TokenProof(body[..32].try_into().unwrap()).encode(&mut out),
            }
            let answer = header.new_answer(0, out.len(), 0).unwrap();
            let pad = frame_padding(out.len());
            socket.write_all(&[&answer.encode()[..], &out, pad].concat()).unwrap();
        }
    });
    let error = connect(rogue, &[TOKEN]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(error.to_string().contains("'rogue' does not hold the group token"), "{error}");
}

#[test]
fn garbage_and_oversize_frames_end_their_connection_and_nothing_else() {
    let node = Node::new(&[TOKEN]);
    let mut oversize = Vec::new();
    NodeRequest::Hello(HelloRequest::new("t", &"s".repeat(20_000))).encode(1, &mut oversize).unwrap();
    let mut early = Vec::new();
    NodeRequest::Ping.encode(1, &mut early).unwrap();
    let mut cut = Vec::new();
    NodeRequest::Hello(HelloRequest::new("t", "s")).encode(1, &mut cut).unwrap();
    cut.truncate(70);
    let pieces: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3],
        vec![0xff; 100_000],
        b"SPUR".iter().copied().chain([0xff; 80]).collect(),
        oversize,
        early,
        cut,
    ];
    for bytes in &pieces {
        let mut socket = node.socket();
        // The node may close before all is sent.
        let _ = socket.write_all(bytes);
        let _ = socket.shutdown(Shutdown::Write);
        let mut said = Vec::new();
        let _ = socket.read_to_end(&mut said);
        assert!(said.len() < 2000, "a stranger receives {} bytes", said.len());
    }
    until("all are gone", || node.server.connection_count() == 0);
    let refused = &node.stats.trust;
    assert!(refused.refused_frames.get() >= 3, "{} refused for their bytes", refused.refused_frames.get());
    connect(node.addr(), &[TOKEN]).unwrap();
}

#[test]
fn silence_and_floods_leave_room_for_those_who_belong() {
    let config = ServerConfig {
        trust: trust(&[TOKEN]),
        max_connections: 300,
        max_pending_handshakes: 20,
        request_timeout: Duration::from_secs(5),
        ..ServerConfig::default()
    };
    let node = Node::with(config);
    // More silent strangers than the connection limit: each newcomer replaces the oldest of them.
    let strangers: Vec<TcpStream> = (0..600).map(|_| node.socket()).collect();
    let refused = &node.stats.trust;
    // On a machine that is suspended for seconds, some are dropped for their silence first.
    until("strangers are pushed out", || refused.refused_limit.get() + refused.refused_silent.get() >= 500);
    connect(node.addr(), &[TOKEN]).unwrap();
    until("the silent ones are dropped", || node.server.connection_count() == 0);
    assert!(node.stats.trust.refused_silent.get() > 0);
    drop(strangers);
    connect(node.addr(), &[TOKEN]).unwrap();
}

fn sealed(tokens: &[&str]) -> Arc<Trust> {
    trust(tokens).with_tls(None).unwrap()
}

#[test]
fn tls_with_the_token_alone_hides_everything_and_wants_both_sides() {
    let node = Node::with(ServerConfig { trust: sealed(&[TOKEN]), ..ServerConfig::default() });
    let (sent, answered) = recorded(node.addr(), |proxy| {
        connect_as(proxy, sealed(&[TOKEN])).unwrap();
    });
    let has = |bytes: &[u8], part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
    for part in [&b"SPUR"[..], b"somebody", TOKEN.as_bytes()] {
        assert!(!has(&sent, part) && !has(&answered, part), "{} is to be seen", String::from_utf8_lossy(part));
    }
    // The token still decides.
    let error = connect_as(node.addr(), sealed(&[OTHER])).unwrap_err();
    assert!(
        error.kind() == ErrorKind::PermissionDenied && error.to_string().contains("another group token"),
        "{error}"
    );
    // Without TLS a reader learns that the node requires it; with TLS, that the node has none.
    let error = connect(node.addr(), &[TOKEN]).unwrap_err();
    assert!(error.kind() == ErrorKind::PermissionDenied && error.to_string().contains("speaks TLS only"), "{error}");
    until("the plain one is counted", || node.stats.trust.refused_tls.get() == 1);
    let plain = Node::new(&[TOKEN]);
    let error = connect_as(plain.addr(), sealed(&[TOKEN])).unwrap_err();
    assert!(error.to_string().contains("was the node started with --tls too?"), "{error}");
    until("TLS where there is none is counted", || plain.stats.trust.refused_tls.get() == 1);
    // The same bytes again, and garbage, are no connection.
    for bytes in [&sent[..], &[0x16; 5000], b"\x16\x03\x01\x40\x00 far too long", b"SPUR"] {
        let mut socket = node.socket();
        let _ = socket.write_all(bytes);
        let _ = socket.shutdown(Shutdown::Write);
        let _ = socket.read_to_end(&mut Vec::new());
    }
    until("all are gone", || node.server.connection_count() == 0);
    assert_eq!(node.stats.trust.proved.get(), 1);
    connect_as(node.addr(), sealed(&[TOKEN])).unwrap();
}

#[test]
fn who_sits_between_two_encrypted_connections_cannot_hand_the_proof_on() {
    let node = Node::with(ServerConfig { trust: sealed(&[TOKEN]), ..ServerConfig::default() });
    let to = node.addr();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let between = listener.local_addr().unwrap();
    // It does not know the token, but performs both TLS handshakes and forwards the messages.
    let relay = std::thread::spawn(move || {
        let tls = sealed(&[OTHER]).tls().unwrap();
        let (reader, _) = listener.accept().unwrap();
        let node = TcpStream::connect(to).unwrap();
        let mut ends = [(reader, tls.accept_session("reader").unwrap()), (node, tls.connect_session("node").unwrap())];
        let mut passed = [Vec::new(), Vec::new()];
        for (socket, _) in &ends {
            socket.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        }
        let give_up = soon();
        while Instant::now() < give_up {
            for at in 0..2 {
                let mut wire = [0; 4096];
                let (socket, sealed) = &mut ends[at];
                if sealed.flush_to(socket).is_err() {
                    return passed;
                }
                let mut from = match socket.read(&mut wire) {
                    Ok(0) => return passed,
                    Ok(n) => &wire[..n],
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => &[],
                    Err(_) => return passed,
                };
                let mut plain = [0; 8192];
                let Ok(n) = sealed.decrypt_into(&mut from, &mut plain) else { return passed };
                passed[at].extend_from_slice(&plain[..n]);
                let (socket, sealed) = &mut ends[1 - at];
                if n > 0 && sealed.seal_to(&plain[..n], socket).is_err() {
                    return passed;
                }
            }
        }
        panic!("neither side ended it");
    });
    let error = connect_as(between, sealed(&[TOKEN])).unwrap_err();
    let [from_reader, from_node] = relay.join().unwrap();
    // The messages were forwarded both ways, and were useless.
    assert!(from_reader.len() > 200 && from_node.len() > 100, "{} and {}", from_reader.len(), from_node.len());
    assert!(
        error.kind() == ErrorKind::PermissionDenied && error.to_string().contains("another group token"),
        "{error}"
    );
    assert_eq!(node.stats.trust.proved.get(), 0);
}
