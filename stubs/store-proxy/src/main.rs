//! A proxy before a store's server, for tests and benchmarks: it delays, limits, breaks and changes answers, and counts.
//!
//!     store-proxy http://127.0.0.1:5555        prints the port that it listens on, on 127.0.0.1
//!     store-proxy --folder DIR                 the same before no server: the folders in DIR are its buckets
//!
//! `PUT /__faults` with JSON sets the [`Faults`], `GET /__stats` has the [`Stats`], `PUT /__stats` clears them. All other
//! requests are passed on with their `Host`, so that signatures hold.

mod folder;

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_RANGE, ETAG, LOCATION, RANGE, RETRY_AFTER};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::time::Sleep;

use folder::Folder;

/// What is done to requests whose path contains `path`. A count of 0 is never; `n` is each nth of them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Faults {
    path: String,
    method: String,
    latency_ms: u64,
    /// Of each connection.
    bytes_per_second: u64,
    /// Answer with this status, and with Retry-After if that is given.
    status: u16,
    status_every: u64,
    retry_after: String,
    /// End the connection after so many bytes of the body.
    cut_after: u64,
    cut_every: u64,
    /// Claim a shorter body, and end it in order.
    shorten_by: u64,
    /// Say nothing more after so many bytes of the body, until the client leaves.
    stall_after: u64,
    stall_every: u64,
    /// Another ETag from this request on, and no comparison by the server.
    etag_from: u64,
    /// Remove headers of answers.
    remove: Vec<String>,
    /// Do not pass these headers of requests on.
    ignore: Vec<String>,
    redirect_to: String,
    /// Answer another range than was asked for.
    shift_range: u64,
    /// Close the connections of all requests, also in the middle of an answer.
    is_down: bool,
}

#[derive(Clone, Debug, Default, Serialize)]
struct Stats {
    requests: u64,
    faulted: u64,
    bytes: u64,
    connections: u64,
    most_at_once: u64,
    /// Requests that had a header by which they are authenticated.
    authenticated: u64,
    methods: std::collections::BTreeMap<String, u64>,
}

enum Backend {
    Server { address: String, client: Client<HttpConnector, Full<Bytes>> },
    Folder(Folder),
}

struct Proxy {
    backend: Backend,
    faults: Mutex<Faults>,
    stats: Mutex<Stats>,
    in_flight: AtomicU64,
    matching: AtomicU64,
    is_down: AtomicBool,
}

type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let backend = match &*words {
        [flag, path] if flag == "--folder" => Backend::Folder(Folder { path: path.into() }),
        [address] => Backend::Server {
            address: address.trim_end_matches('/').to_owned(),
            client: Client::builder(TokioExecutor::new()).pool_max_idle_per_host(256).build_http(),
        },
        _ => return Err("usage: store-proxy http://HOST:PORT, or --folder DIR".into()),
    };
    let proxy = Arc::new(Proxy {
        backend,
        faults: Mutex::default(),
        stats: Mutex::default(),
        in_flight: AtomicU64::new(0),
        matching: AtomicU64::new(0),
        is_down: AtomicBool::new(false),
    });
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
    println!("{}", listener.local_addr()?.port());
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        let proxy = Arc::clone(&proxy);
        proxy.stats.lock().unwrap().connections += 1;
        tokio::spawn(async move {
            let service = service_fn(|request| Arc::clone(&proxy).answer(request));
            // An error ends this connection: that is how faults are made.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(socket), service)
                .await;
        });
    }
}

impl Proxy {
    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<FaultyBody>, Error> {
        match (request.method(), request.uri().path()) {
            (&Method::PUT, "/__faults") => {
                let text = request.into_body().collect().await?.to_bytes();
                let faults: Faults = serde_json::from_slice(&text)?;
                // With a path, answers that have begun go on.
                self.is_down.store(faults.is_down && faults.path.is_empty(), Relaxed);
                *self.faults.lock().unwrap() = faults;
                self.matching.store(0, Relaxed);
                return Ok(whole(StatusCode::OK, Bytes::new()));
            }
            (&Method::PUT, "/__stats") => {
                let mut stats = self.stats.lock().unwrap();
                *stats = Stats::default();
                return Ok(whole(StatusCode::OK, Bytes::new()));
            }
            (&Method::GET, "/__stats") => {
                let text = serde_json::to_vec(&*self.stats.lock().unwrap())?;
                return Ok(whole(StatusCode::OK, text.into()));
            }
            _ => {}
        }
        let now = self.in_flight.fetch_add(1, Relaxed) + 1;
        {
            let mut stats = self.stats.lock().unwrap();
            stats.requests += 1;
            stats.most_at_once = stats.most_at_once.max(now);
            *stats.methods.entry(request.method().to_string()).or_default() += 1;
            let has = |name: &str| request.headers().contains_key(name);
            if has("authorization") || has("x-amz-security-token") {
                stats.authenticated += 1;
            }
        }
        let guard = InFlight { proxy: Arc::clone(&self), is_counted: true };
        self.pass(request, guard).await
    }

    async fn pass(
        &self,
        request: Request<Incoming>,
        guard: InFlight,
    ) -> Result<Response<FaultyBody>, Error> {
        let mut faults = self.faults.lock().unwrap().clone();
        let is_matching = request.uri().path().contains(&faults.path)
            && (faults.method.is_empty() || request.method().as_str() == faults.method);
        if !is_matching {
            faults = Faults {
                latency_ms: faults.latency_ms,
                bytes_per_second: faults.bytes_per_second,
                ..Faults::default()
            };
        }
        let number = if is_matching { self.matching.fetch_add(1, Relaxed) + 1 } else { 0 };
        let is_due = |every: u64| every > 0 && number.is_multiple_of(every);
        if faults.latency_ms > 0 {
            tokio::time::sleep(Duration::from_millis(faults.latency_ms)).await;
        }
        let count_fault = || self.stats.lock().unwrap().faulted += 1;
        if faults.is_down {
            count_fault();
            return Err("down".into());
        }
        if is_due(faults.status_every) {
            count_fault();
            let mut answer =
                whole(StatusCode::from_u16(faults.status)?, Bytes::from_static(b"<Error/>"));
            if !faults.retry_after.is_empty() {
                answer.headers_mut().insert(RETRY_AFTER, faults.retry_after.parse()?);
            }
            return Ok(answer);
        }
        if !faults.redirect_to.is_empty() {
            count_fault();
            let to = format!("{}{}", faults.redirect_to, request.uri().path());
            let mut answer = whole(StatusCode::FOUND, Bytes::new());
            answer.headers_mut().insert(LOCATION, to.parse()?);
            return Ok(answer);
        }
        let (mut parts, body) = request.into_parts();
        let has_other_etag = faults.etag_from > 0 && number >= faults.etag_from;
        if has_other_etag {
            parts.headers.remove("if-match");
        }
        for name in &faults.ignore {
            parts.headers.remove(name);
        }
        if faults.shift_range > 0
            && let Some(range) = parts.headers.get(RANGE).and_then(|range| range.to_str().ok())
            && let Some((start, end)) = range.trim_start_matches("bytes=").split_once('-')
        {
            let shifted = |text: &str| text.parse::<u64>().map(|at| at + faults.shift_range);
            let range = format!("bytes={}-{}", shifted(start)?, shifted(end)?);
            parts.headers.insert(RANGE, range.parse()?);
        }
        let body = body.collect().await?.to_bytes();
        let (mut head, body) = self.backend.request(parts, body).await?;
        if has_other_etag && head.headers.contains_key(ETAG) {
            count_fault();
            head.headers.insert(ETAG, "\"another\"".parse()?);
        }
        for name in &faults.remove {
            head.headers.remove(name);
        }
        let mut faulty = FaultyBody { body: Some(body), ..FaultyBody::new(self, &faults, guard) };
        let is_part = head.headers.contains_key(CONTENT_RANGE);
        if is_part && is_due(faults.cut_every) {
            count_fault();
            faulty.cut_after = Some(faults.cut_after);
        }
        if is_part && is_due(faults.stall_every) {
            count_fault();
            faulty.stall_after = Some(faults.stall_after);
        }
        if is_part && faults.shorten_by > 0 {
            count_fault();
            // Chunked, so that the end looks in order.
            let length: u64 = head
                .headers
                .get("content-length")
                .and_then(|n| n.to_str().ok())
                .and_then(|n| n.parse().ok())
                .unwrap_or(0);
            head.headers.remove("content-length");
            faulty.end_after = Some(length.saturating_sub(faults.shorten_by));
        }
        Ok(Response::from_parts(head, faulty))
    }
}

impl Backend {
    async fn request(
        &self,
        mut parts: hyper::http::request::Parts,
        body: Bytes,
    ) -> Result<(hyper::http::response::Parts, BodyKind), Error> {
        match self {
            Backend::Server { address, client } => {
                let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
                parts.uri = format!("{address}{path}").parse()?;
                let answer = client.request(Request::from_parts(parts, Full::new(body))).await?;
                let (head, body) = answer.into_parts();
                Ok((head, BodyKind::Stream(body)))
            }
            Backend::Folder(folder) => {
                let (head, body) = folder.answer(&parts).into_parts();
                Ok((head, BodyKind::Whole(Some(body))))
            }
        }
    }
}

struct InFlight {
    proxy: Arc<Proxy>,
    is_counted: bool,
}

impl InFlight {
    fn end(&mut self) {
        if std::mem::take(&mut self.is_counted) {
            self.proxy.in_flight.fetch_sub(1, Relaxed);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.end();
    }
}

fn whole(status: StatusCode, body: Bytes) -> Response<FaultyBody> {
    let body = FaultyBody { body: Some(BodyKind::Whole(Some(body))), ..FaultyBody::plain() };
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer
}

enum BodyKind {
    Stream(Incoming),
    Whole(Option<Bytes>),
}

/// A body that is slowed down, cut or stalled.
struct FaultyBody {
    body: Option<BodyKind>,
    sent: u64,
    bytes_per_second: u64,
    started: Instant,
    sleep: Option<Pin<Box<Sleep>>>,
    pending: Option<Bytes>,
    cut_after: Option<u64>,
    is_flushed: bool,
    stall_after: Option<u64>,
    end_after: Option<u64>,
    guard: Option<InFlight>,
}

/// Bytes that are sent between two looks at the clock.
const PIECE_BYTES: usize = 64 << 10;

/// The wait before a cut, in which earlier bytes are sent.
const FLUSH_INTERVAL: Duration = Duration::from_millis(3);

impl FaultyBody {
    fn plain() -> FaultyBody {
        FaultyBody {
            body: None,
            sent: 0,
            bytes_per_second: 0,
            started: Instant::now(),
            sleep: None,
            pending: None,
            cut_after: None,
            is_flushed: false,
            stall_after: None,
            end_after: None,
            guard: None,
        }
    }

    fn new(_: &Proxy, faults: &Faults, guard: InFlight) -> FaultyBody {
        FaultyBody {
            bytes_per_second: faults.bytes_per_second,
            guard: Some(guard),
            ..FaultyBody::plain()
        }
    }

    fn next_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        if let Some(bytes) = self.pending.take() {
            return Poll::Ready(Some(Ok(bytes)));
        }
        match &mut self.body {
            None => Poll::Ready(None),
            Some(BodyKind::Whole(bytes)) => {
                Poll::Ready(bytes.take().filter(|bytes| !bytes.is_empty()).map(Ok))
            }
            Some(BodyKind::Stream(body)) => loop {
                match Pin::new(&mut *body).poll_frame(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(None) => return Poll::Ready(None),
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error.into()))),
                    Poll::Ready(Some(Ok(frame))) => {
                        if let Ok(bytes) = frame.into_data() {
                            return Poll::Ready(Some(Ok(bytes)));
                        }
                    }
                }
            },
        }
    }
}

impl Body for FaultyBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        if let Some(sleep) = &mut this.sleep {
            if sleep.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            this.sleep = None;
        }
        if this.guard.as_ref().is_some_and(|guard| guard.proxy.is_down.load(Relaxed)) {
            return Poll::Ready(Some(Err("down".into())));
        }
        if this.stall_after.is_some_and(|after| this.sent >= after) {
            return Poll::Pending;
        }
        if this.cut_after.is_some_and(|after| this.sent >= after) {
            if std::mem::replace(&mut this.is_flushed, true) {
                return Poll::Ready(Some(Err("cut".into())));
            }
            // Waits until the bytes before the cut are sent.
            let sleep = this.sleep.insert(Box::pin(tokio::time::sleep(FLUSH_INTERVAL)));
            if sleep.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
        }
        if this.end_after.is_some_and(|after| this.sent >= after) {
            return Poll::Ready(None);
        }
        let mut bytes = match this.next_piece(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
            Poll::Ready(Some(Ok(bytes))) => bytes,
        };
        let limits = [this.cut_after, this.stall_after, this.end_after];
        let room = limits.into_iter().flatten().map(|after| (after - this.sent) as usize).min();
        let is_last = match &this.body {
            Some(BodyKind::Stream(body)) => body.is_end_stream(),
            _ => true,
        };
        let most = room.unwrap_or(usize::MAX).min(match this.bytes_per_second > 0 {
            true => PIECE_BYTES,
            // The last 64 KiB are a piece of their own, so that the request counts until these are sent.
            false if is_last && bytes.len() > PIECE_BYTES => bytes.len() - PIECE_BYTES,
            false => usize::MAX,
        });
        if bytes.len() > most {
            this.pending = Some(bytes.split_off(most));
        }
        this.sent += bytes.len() as u64;
        if let Some(guard) = &mut this.guard {
            guard.proxy.stats.lock().unwrap().bytes += bytes.len() as u64;
            // A client that has the last byte may send its next request before this body is dropped.
            if is_last && this.pending.is_none() {
                guard.end();
            }
        }
        if this.bytes_per_second > 0 {
            let due = Duration::from_secs_f64(this.sent as f64 / this.bytes_per_second as f64);
            this.sleep = Some(Box::pin(tokio::time::sleep_until((this.started + due).into())));
        }
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match &self.body {
            Some(BodyKind::Whole(Some(bytes))) if self.end_after.is_none() => {
                hyper::body::SizeHint::with_exact(bytes.len() as u64)
            }
            Some(BodyKind::Stream(body)) if self.end_after.is_none() => body.size_hint(),
            Some(BodyKind::Stream(_)) | Some(BodyKind::Whole(Some(_))) => {
                hyper::body::SizeHint::default()
            }
            _ => hyper::body::SizeHint::with_exact(0),
        }
    }
}
