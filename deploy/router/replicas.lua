-- Which replica a request goes to, and which version each one serves. Loaded by haproxy.cfg.
--
-- Requests that begin alike prefer the same replica, because it may have their keys and values in its prefix cache: those
-- with the same header x-session-id, or else with the same start of the prompt. Each such key puts the replicas in an order
-- of its own (rendezvous hashing), which a replica that comes or goes does not change for the others. The first one in this
-- order is taken that serves the version asked for and is not much busier than the average (as in "Consistent Hashing with
-- Bounded Loads", Mirrokni, Thorup and Zadimoghaddam, 2016).

local BACKEND = "replicas"
local PROBE_MS = 250
local RETRY_MS = 20
local WAIT_S = tonumber(os.getenv("ROUTER_WAIT_S")) or 10
local PREFIX_BYTES = 1024
local MOST_OVER_AVERAGE, SLACK = 1.25, 2 -- a look at the version counts as a request too

local versions = {} -- by name of a replica; nil where it is not known, or the replica sleeps

-- Of one replica: `up`, how many requests it works on, and the version that it serves; nil if there is none of this name.
local function state(name, server)
    local stats = server:get_stats()
    if stats.status:sub(1, 5) ~= "MAINT" then
        return {name = name, up = stats.status:sub(1, 2) == "UP", requests = stats.scur, version = versions[name]}
    end
end

local function replicas()
    local found = {}
    for name, server in pairs(core.backends[BACKEND].servers) do
        found[#found + 1] = state(name, server)
    end
    return found
end

local function probe(name)
    local reply = core.httpclient():get{
        url = "http://replica/deltasync/status?commits=0",
        dst = "abns@" .. os.getenv("ROUTER_PROBES"),
        headers = {["x-deltasync-replica"] = {name}},
        timeout = 5000,
    }
    versions[name] = nil
    -- Another one answers if this one is down.
    local answered = reply and reply.status == 200 and (reply.headers["x-deltasync-replica"] or {})[0]
    if answered == name and not reply.body:find('"state"%s*:%s*"sleeping"') then
        versions[name] = tonumber(reply.body:match('"version"%s*:%s*(%d+)'))
    end
end

core.register_init(function()
    for name, server in pairs(core.backends[BACKEND].servers) do
        core.register_task(function()
            while true do
                local replica = state(name, server)
                if not (replica and replica.up and pcall(probe, name)) then
                    versions[name] = nil
                end
                core.msleep(PROBE_MS)
            end
        end)
    end
end)

local function now()
    local time = core.now()
    return time.sec + time.usec / 1e6
end

-- What requests have in common that should go to one replica.
local function affinity(txn)
    local session = txn.sf:req_hdr("x-session-id")
    if session ~= "" then
        return session
    end
    local body = txn.sf:req_body()
    local _, prompt = body:find('"prompt"%s*:')
    if not prompt then
        _, prompt = body:find('"messages"%s*:')
    end
    return body:sub((prompt or 0) + 1, (prompt or 0) + PREFIX_BYTES)
end

-- The version that a request's headers demand: "7", ">=7" or ">=latest", or "" if none does; nil if replicas refuse it:
-- any other value, and several that differ.
local function demanded(txn)
    local wanted
    for _, header in pairs(txn.http:req_get_headers()["x-deltasync-version"] or {}) do
        for each in (header .. ","):gmatch("([^,]*),") do -- a proxy may have joined repeated ones
            local value = each:gsub("%s+", "")
            local digits = value:match("^>=([1-9]%d*)$") or value:match("^[1-9]%d*$") or ""
            if wanted and wanted ~= value or value ~= ">=latest" and (digits == "" or #digits > 18) then
                return nil
            end
            wanted = value
        end
    end
    return wanted or ""
end

-- Whether a version is what a request demands; the replica holds its reply to that.
local function fits(wanted, version)
    if wanted == "" or version == nil then
        return wanted == ""
    end
    local least = wanted:match("^>=(.+)$")
    if least == "latest" then
        for _, other in pairs(versions) do
            if other > version then
                return false
            end
        end
        return true
    end
    return least and version >= tonumber(least) or version == tonumber(wanted)
end

local function choose(txn, key, wanted)
    local able, running = {}, 0
    for _, replica in ipairs(replicas()) do
        if replica.up and fits(wanted, replica.version) then
            replica.score = txn.c:xxh32(key .. "\0" .. replica.name)
            running = running + replica.requests
            able[#able + 1] = replica
        end
    end
    table.sort(able, function(one, other) return one.score > other.score end)
    for _, replica in ipairs(able) do
        if replica.requests < MOST_OVER_AVERAGE * (running + 1) / #able + SLACK then
            return replica.name
        end
    end
end

core.register_action("choose_replica", {"http-req"}, function(txn)
    local wanted, key, deadline = demanded(txn), affinity(txn), now() + WAIT_S
    if not wanted then
        txn:set_var("txn.junk", true)
        return
    end
    while true do
        local name = choose(txn, key, wanted)
        if name then
            txn:set_var("txn.replica", name)
        end
        if name or wanted == "" or now() > deadline then
            return
        end
        core.msleep(RETRY_MS)
    end
end)

core.register_service("replicas", "http", function(applet)
    local told = {}
    for _, replica in ipairs(replicas()) do
        told[#told + 1] = string.format('"%s": {"up": %s, "version": %s, "requests": %d}',
            replica.name, replica.up, replica.version or "null", replica.requests)
    end
    local body = "{" .. table.concat(told, ", ") .. "}\n"
    applet:set_status(200)
    applet:add_header("content-type", "application/json")
    applet:add_header("content-length", tostring(#body))
    applet:start_response()
    applet:send(body)
end)
