-- The delay before each answer's first byte, refusals above a rate, and the counters.
--   /d20/PATH            after 20 ms
--   /tail/PATH           after 10 ms; 2 % of the requests after 400 ms
--   /limit200/d20/PATH   200 requests a second; 503 for what is beyond, at once
--   /limit200s/d20/PATH  the same, with Retry-After: 1
local server = {}
local counters = ngx.shared.counters
local root = os.getenv("HEADRACE_BENCH_ROOT")
local sizes = {}
local buckets = {}
local counted = { "requests", "throttled", "asked_bytes", "sent_bytes", "peak_in_flight" }

local function size_of(path)
  if not sizes[path] then
    local file = io.open(root .. path, "rb")
    if not file then return 0 end
    sizes[path] = file:seek("end")
    file:close()
  end
  return sizes[path]
end

-- Bytes that a request asks for; the server counts them when it is asked, "sent" when it has answered.
local function asked_bytes(path)
  local start, stop = (ngx.var.http_range or ""):match("^bytes=(%d*)%-(%d*)$")
  if not start then return size_of(path) end
  if start == "" then return tonumber(stop) or 0 end
  local last = size_of(path) - 1
  return math.max(0, math.min(tonumber(stop) or last, last) - tonumber(start) + 1)
end

local function delay_s(name)
  if name == "tail" then return math.random() < 0.02 and 0.4 or 0.01 end
  local milliseconds = name:match("^d(%d+)$")
  return milliseconds and milliseconds / 1000
end

-- Whether there is no token left: they come at `rate` a second, and those of a tenth of a second can be saved up.
local function is_too_many(rate)
  local now, most = ngx.now(), rate / 10
  local bucket = buckets[rate] or { tokens = most, at = now }
  bucket.tokens = math.min(most, bucket.tokens + rate * (now - bucket.at))
  bucket.at, buckets[rate] = now, bucket
  if bucket.tokens < 1 then return true end
  bucket.tokens = bucket.tokens - 1
end

-- A request is counted when it comes: one that its client has given up ends only after its delay.
function server.delay()
  counters:incr("requests", 1, 0)
  local in_flight = counters:incr("in_flight", 1, 0)
  if in_flight > (counters:get("peak_in_flight") or 0) then counters:set("peak_in_flight", in_flight) end
  local rate, says_when, rest = ngx.var.uri:match("^/limit(%d+)(s?)(/.*)$")
  local name, path = (rest or ngx.var.uri):match("^/(%w+)(/.*)$")
  local seconds = name and delay_s(name)
  if not seconds then return ngx.exit(404) end
  if rate and is_too_many(tonumber(rate)) then
    counters:incr("throttled", 1, 0)
    if says_when == "s" then ngx.header["Retry-After"] = "1" end
    return ngx.exit(503)
  end
  if ngx.req.get_method() == "GET" then counters:incr("asked_bytes", asked_bytes(path), 0) end
  ngx.req.set_uri(path, false)
  if seconds > 0 then ngx.sleep(seconds) end
end

function server.count()
  counters:incr("in_flight", -1, 0)
  counters:incr("sent_bytes", tonumber(ngx.var.bytes_sent), 0)
end

function server.stats()
  ngx.print('{"pid": ', ngx.worker.pid())
  for _, name in ipairs(counted) do ngx.print(string.format(', "%s": %.0f', name, counters:get(name) or 0)) end
  ngx.say("}")
end

function server.reset()
  for _, name in ipairs(counted) do counters:set(name, 0) end
  buckets = {}
  math.randomseed(1) -- the same answers are late in every run
  ngx.say("{}")
end

return server
